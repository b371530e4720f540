// SPDX-License-Identifier: BSD-3-Clause
#include "group/replicas.h"

#include <ATen/ATen.h>

#include <sstream>

namespace powersgd {
namespace {

// The sum of word * weight modulo 2^64. The weights are odd, so a change of one word always shows.
at::Tensor hash_bits(const at::Tensor& tensor) {
  const at::ScalarType word = tensor.element_size() == 8 ? at::kLong : at::kInt;
  const at::Tensor words = tensor.contiguous().view(word).to(at::kLong).flatten();
  const at::Tensor places = at::arange(1, words.numel() + 1, words.options());
  constexpr int64_t kSpread = 0x1E3779B97F4A7C15;  // about 2^61 over the golden ratio
  return words.mul(places.mul_(kSpread).bitwise_or_(1)).sum();
}

// [size, replicas, 2]: each rank's hashes of q_warm and of p_hat, 0 where there is nothing yet.
at::Tensor hashes_of_all(Channel& channel, int rank, int size,
                         const std::vector<Replica>& replicas) {
  const auto device = replicas.front().state->q_warm.device();
  const auto count = static_cast<int64_t>(replicas.size());
  at::Tensor hashes = at::zeros({size, count, 2}, at::device(device).dtype(at::kLong));
  for (int64_t i = 0; i < count; ++i) {
    const auto& [name, state, has_p] = replicas[static_cast<size_t>(i)];
    hashes[rank][i][0].copy_(hash_bits(state->q_warm));
    if (has_p) hashes[rank][i][1].copy_(hash_bits(state->p_hat));
  }
  channel.allreduce(hashes);  // the other ranks' rows are 0
  return hashes.cpu();
}

// A failed all-reduce leaves the tensor as it was.
void copy_from(bool is_source, Channel& channel, const at::Tensor& tensor) {
  at::Tensor sent = is_source ? tensor.clone() : at::zeros_like(tensor);
  channel.allreduce(sent);
  tensor.copy_(sent);
}

std::string describe(const Replica& replica, const at::Tensor& differs) {
  std::ostringstream ranks;
  for (int64_t r = 0, named = 0; r < differs.size(0); ++r) {
    if (differs[r].any().item<bool>()) ranks << (named++ == 0 ? "" : ", ") << r;
  }
  const bool q = differs.select(1, 0).any().item<bool>();
  const bool p = differs.select(1, 1).any().item<bool>();
  return "the " +
         std::string(q && p ? "Q and P"
                     : q    ? "Q"
                            : "P") +
         " of " + replica.name + " differed from rank 0's on rank " + ranks.str() +
         "; all ranks now use rank 0's. The model's parameters may differ as well";
}

}  // namespace

std::vector<std::string> restore_agreement(Channel& channel, int rank, int size,
                                           const std::vector<Replica>& replicas, int source) {
  std::vector<Replica> started;
  for (const Replica& replica : replicas) {
    if (replica.state->allocated()) started.push_back(replica);
  }
  if (started.empty()) return {};
  const at::Tensor hashes = hashes_of_all(channel, rank, size, started);
  const at::Tensor differs = hashes.ne(hashes[source]);
  std::vector<std::string> lines;
  for (size_t i = 0; i < started.size(); ++i) {
    const at::Tensor here = differs.select(1, static_cast<int64_t>(i));
    if (!here.any().item<bool>()) continue;
    ParameterState& state = *started[i].state;
    // The residual is computed from this rank's own factors, so it is taken first.
    if (started[i].has_p) state.set_residual(state.residual());
    copy_from(rank == source, channel, state.q_warm);
    if (started[i].has_p) copy_from(rank == source, channel, state.p_hat);
    lines.push_back(describe(started[i], here));
  }
  return lines;
}

}  // namespace powersgd
