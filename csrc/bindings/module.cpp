// SPDX-License-Identifier: BSD-3-Clause
#include <pybind11/pybind11.h>

#include "bindings/gil.h"
#include "bindings/register.h"
#include "powersgd/engine/interpreter.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace powersgd;
  set_run_unlocked(&without_gil);
  module.attr("kernels_version") = POWERSGD_KERNELS_VERSION;
  module.attr("torch_version") = POWERSGD_TORCH_VERSION;
  module.attr("cuda_architectures") = POWERSGD_CUDA_ARCHITECTURES;
  register_options(module);
  register_plan(module);
  register_stages(module);
  register_backend(module);
  register_model(module);
}
