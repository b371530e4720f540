// SPDX-License-Identifier: BSD-3-Clause
#include "engine/direct_channel.h"

#include <ATen/ATen.h>

#include <numeric>

#include "engine/backend_channel.h"

namespace powersgd {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

at::Tensor rows(const at::Tensor& tensor, int64_t count) { return tensor.view({count, -1}); }

}  // namespace

c10d::Backend& DirectChannel::backend() {
  if (!backend_) backend_ = connect_();
  return *backend_;
}

void DirectChannel::allreduce(at::Tensor& payload) {
  BackendChannel(backend(), timeout_).allreduce(payload);
}

void DirectChannel::allgather(at::Tensor& output, at::Tensor& input, const Members* members) {
  begin(output, input, members, /*scatters=*/false);
}

void DirectChannel::alltoall(at::Tensor& output, at::Tensor& input, const Members* members) {
  begin(output, input, members, /*scatters=*/true);
}

void DirectChannel::begin(const at::Tensor& output, const at::Tensor& input, const Members* members,
                          bool scatters) {
  const int32_t tag = mail_.tag + static_cast<int32_t>(begun_);
  const Members& among = begin_round(output, members).members;
  const int size = among.count(), own = among.own;
  const auto part_for = [&](const at::Tensor& all, int member) {
    return scatters ? rows(all, size)[member] : all.flatten();
  };
  copy_unless_same(rows(output, size)[own], part_for(input, own));
  sent_ = input.cpu();
  for (int i = 1; i < size; ++i) {  // each rank begins with a different peer
    const int member = (own + i) % size;
    std::vector<at::Tensor> part = {part_for(sent_, member)};
    sends_.push_back(backend().send(part, among.ranks[static_cast<size_t>(member)], tag));
  }
}

Members DirectChannel::all_ranks() {
  Members all{std::vector<int>(static_cast<size_t>(backend().getSize())), backend().getRank()};
  std::iota(all.ranks.begin(), all.ranks.end(), 0);
  return all;
}

const Mail::Round& DirectChannel::begin_round(const at::Tensor& output, const Members* members) {
  if (begun_ == mail_.rounds.size()) {
    const at::Tensor landing =
        output.is_cpu() ? output : at::empty(output.sizes(), output.options().device(at::kCPU));
    mail_.rounds.push_back({output, landing, members ? *members : all_ranks(), {}});
    post(mail_.rounds.back(), mail_.tag + static_cast<int32_t>(begun_));
  }
  const Mail::Round& round = mail_.rounds[begun_++];
  TORCH_INTERNAL_ASSERT(round.output.data_ptr() == output.data_ptr() &&
                        round.output.nbytes() == output.nbytes());
  in_flight_ = true;
  return round;
}

void DirectChannel::post(Mail::Round& round, int32_t tag) {
  const int size = round.members.count(), own = round.members.own;
  for (int i = 1; i < size; ++i) {
    const int member = (own + size - i) % size;
    std::vector<at::Tensor> part = {rows(round.landing, size)[member]};
    const int peer = round.members.ranks[static_cast<size_t>(member)];
    round.receives.push_back(backend().recv(part, peer, tag));
  }
}

void DirectChannel::wait() {
  const auto wait_for = [this](const std::vector<WorkPtr>& works) {
    for (const WorkPtr& work : works) {
      if (!work->wait(timeout_ == c10d::kUnsetTimeout ? kNoTimeout : timeout_)) throw_closed();
    }
  };
  wait_for(mail_.rounds[begun_ - 1].receives);
  wait_for(sends_);
}

void DirectChannel::abort() {
  const auto abort_all = [](const std::vector<WorkPtr>& works) {
    for (const WorkPtr& work : works) {
      try {
        work->abort();
      } catch (const std::exception&) {  // the backend cannot: the wait ends at its timeout
        return;
      }
    }
  };
  abort_all(mail_.rounds[begun_ - 1].receives);
  abort_all(sends_);
}

void DirectChannel::end() {
  in_flight_ = false;
  sends_.clear();
  sent_.reset();
  Mail::Round& round = mail_.rounds[begun_ - 1];
  round.receives.clear();
  if (round.output.is_cpu()) return;
  const int64_t size = round.members.count(), own = round.members.own;
  const at::Tensor output = rows(round.output, size), landing = rows(round.landing, size);
  output.narrow(0, 0, own).copy_(landing.narrow(0, 0, own));
  output.narrow(0, own + 1, size - own - 1).copy_(landing.narrow(0, own + 1, size - own - 1));
}

Mail DirectChannel::post_ahead(int32_t tag) {
  mail_.tag = tag;
  for (size_t i = 0; i < mail_.rounds.size(); ++i) {
    post(mail_.rounds[i], tag + static_cast<int32_t>(i));
  }
  return std::move(mail_);
}

}  // namespace powersgd
