// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>

namespace powersgd {

// Called on an engine's thread before each stage with its name. An exception fails the step.
using StageProbe = std::function<void(const char* stage)>;

}  // namespace powersgd
