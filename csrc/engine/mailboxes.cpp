// SPDX-License-Identifier: BSD-3-Clause
#include "engine/mailboxes.h"

#include <exception>
#include <utility>

namespace powersgd {
namespace {

constexpr uint64_t kTagsOfAJob = 16;  // half of them for the job, half for the next of its exchange
constexpr uint64_t kTags = uint64_t{1} << 30;

int32_t tag_of(uint64_t number, bool is_next) {
  return static_cast<int32_t>((number * kTagsOfAJob + (is_next ? kTagsOfAJob / 2 : 0)) % kTags);
}

}  // namespace

Mail Mailboxes::take(const Flight& flight) {
  if (flight.in_series == 0) return {};
  const auto found = mailboxes_.find(flight.exchange);
  if (found == mailboxes_.end()) return {tag_of(flight.in_series, /*is_next=*/false), {}};
  Mail mail = std::exchange(found->second.mail, {});
  mail.tag = tag_of(found->second.last, /*is_next=*/true);
  return mail;
}

bool Mailboxes::put(Flight& flight, bool more) {
  for (auto it = mailboxes_.begin(); it != mailboxes_.end();) {
    it = it->first.expired() ? mailboxes_.erase(it) : std::next(it);
  }
  if (flight.in_series == 0 || flight.exchange.expired()) return true;
  Mailbox& mailbox = mailboxes_[flight.exchange];
  const bool recurs = std::exchange(mailbox.last, flight.in_series) > 0;
  if (!recurs || !more || flight.failed()) return true;
  try {
    mailbox.mail = flight.channel().post_ahead(tag_of(flight.in_series, /*is_next=*/true));
  } catch (const std::exception&) {  // the next job's sends fail for the same reason
    return false;
  }
  return true;
}

}  // namespace powersgd
