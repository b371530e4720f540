// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <pybind11/pybind11.h>

namespace powersgd {

// Each function adds one part of the library to the Python module.
void register_options(pybind11::module_& module);
void register_plan(pybind11::module_& module);
void register_stages(pybind11::module_& module);
void register_backend(pybind11::module_& module);
void register_model(pybind11::module_& module);

}  // namespace powersgd
