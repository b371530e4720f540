// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <pybind11/pybind11.h>

#include "powersgd/group/stats.h"

namespace powersgd {

// Makes a dictionary of the snapshot that `count()` returns. `count()` runs without the GIL.
template <typename Count>
pybind11::dict stats_dict(const Count& count) {
  StatsSnapshot stats;
  {
    const pybind11::gil_scoped_release no_gil;
    stats = count();
  }
  pybind11::dict seconds;
  for (int i = 0; i < kStages; ++i) {
    seconds[to_string(static_cast<Stage>(i))] = stats.seconds[static_cast<size_t>(i)];
  }
  pybind11::dict result;
  result["steps"] = stats.steps;
  result["skipped_steps"] = stats.skipped_steps;
  result["compressed_calls"] = stats.compressed_calls;
  result["exact_calls"] = stats.exact_calls;
  result["differences"] = stats.differences;
  result["bytes_before"] = stats.bytes_before;
  result["bytes_after"] = stats.bytes_after;
  result["compressed_bytes_before"] = stats.compressed_bytes_before;
  result["compressed_bytes_after"] = stats.compressed_bytes_after;
  result["seconds"] = seconds;
  return result;
}

}  // namespace powersgd
