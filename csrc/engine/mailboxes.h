// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "engine/flight.h"

namespace powersgd {

// The receives that a ThreadEngine has posted for future jobs, by exchange.
//
// The tags of a job's messages follow from a number, counted among the jobs that have an exchange:
// the first job of an exchange uses its own number, later ones their predecessor's. So tags are the
// same on all ranks, and none is used twice.
class Mailboxes {
 public:
  // Returns the mail of a job that begins.
  Mail take(const Flight& flight);
  // Posts the receives of the job after `flight`, which has ended, if `more` jobs are to come.
  // Begins with the second job of an exchange, because Gloo keeps a trace of unused receives. Drops
  // the receives of exchanges that are gone. Returns false if the backend failed.
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
