// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "engine/flight.h"

namespace powersgd {

// The receives that a ThreadEngine has posted for jobs to come, by exchange.
//
// The tags of a job's messages follow from the numbers of the jobs that have an exchange: its own
// for the first one of an exchange, and that of the one before otherwise. So they are the same on
// all ranks, and none is used twice.
class Mailboxes {
 public:
  // Returns the mail of a job that begins.
  Mail take(const Flight& flight);
  // Posts the receives of the next job after one that has ended, from the second one of an exchange
  // on: Gloo keeps a trace of receives that are never used. There will be none unless `more`. Drops
  // those of exchanges that are gone. Returns false if the backend failed.
  bool put(Flight& flight, bool more);
  void clear() { mailboxes_.clear(); }

 private:
  struct Mailbox {
    uint64_t last = 0;  // the number of the last job
    Mail mail;
  };
  std::map<std::weak_ptr<const void>, Mailbox, std::owner_less<>> mailboxes_;
};

}  // namespace powersgd
