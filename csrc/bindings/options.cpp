// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/options.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings/register.h"

namespace py = pybind11;

namespace powersgd {
namespace {

std::optional<std::string> optional_name(const std::optional<DType>& dtype) {
  if (!dtype) return std::nullopt;
  return to_string(*dtype);
}

}  // namespace

void register_options(py::module_& module) {
  py::class_<Options>(module, "Options")
      .def(py::init<>())
      .def_readwrite("matrix_approximation_rank", &Options::matrix_approximation_rank)
      .def_readwrite("start_powerSGD_iter", &Options::start_powerSGD_iter)
      .def_readwrite("min_compression_rate", &Options::min_compression_rate)
      .def_readwrite("use_error_feedback", &Options::use_error_feedback)
      .def_readwrite("warm_start", &Options::warm_start)
      .def_readwrite("orthogonalization_epsilon", &Options::orthogonalization_epsilon)
      .def_readwrite("random_seed", &Options::random_seed)
      .def_readwrite("compression_stats_logging_frequency",
                     &Options::compression_stats_logging_frequency)
      .def_readwrite("min_numel", &Options::min_numel)
      .def_readwrite("inner", &Options::inner)
      .def_readwrite("alternating", &Options::alternating)
      .def_readwrite("check_every", &Options::check_every)
      .def_property(
          "scope", [](const Options& self) { return to_string(self.scope); },
          [](Options& self, const std::string& name) { self.scope = parse_scope(name); })
      .def_property(
          "residual_dtype", [](const Options& self) { return to_string(self.residual_dtype); },
          [](Options& self, const std::string& name) { self.residual_dtype = parse_dtype(name); })
      .def_property(
          "wire_dtype", [](const Options& self) { return optional_name(self.wire_dtype); },
          [](Options& self, const std::optional<std::string>& name) {
            self.wire_dtype = name ? std::optional<DType>(parse_dtype(*name)) : std::nullopt;
          })
      .def("validate", [](const Options& self) { validate(self); });
}

}  // namespace powersgd
