// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>

namespace powersgd {

// Called with the number of a bucket at each point of its step: "ready", on the submitter's stream;
// each stage by its name, before it runs; "collective" and "collective_end" around each collective
// of a reduction; "received", after the last of them; and "end". All but the first are called on an
// engine's thread and stream. An exception fails the step; at "collective_end", none may be thrown.
using StageProbe = std::function<void(const char* reached, int64_t bucket)>;

}  // namespace powersgd
