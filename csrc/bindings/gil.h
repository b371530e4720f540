// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>

namespace powersgd {

// Runs `body` without the GIL, whether or not this thread holds it.
inline void without_gil(const std::function<void()>& body) {
  if (!Py_IsInitialized() || !PyGILState_Check()) return body();
  const pybind11::gil_scoped_release no_gil;
  body();
}

}  // namespace powersgd
