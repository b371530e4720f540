// SPDX-License-Identifier: BSD-3-Clause
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/register.h"
#include "bindings/stats.h"
#include "powersgd/core/options.h"
#include "powersgd/engine/interpreter.h"
#include "powersgd/group/backend.h"
#include "powersgd/group/scope_override.h"

namespace py = pybind11;

namespace powersgd {
namespace {

using BackendClass =
    py::class_<BackendPowerSGD, c10::intrusive_ptr<BackendPowerSGD>, c10d::Backend>;
using NoGil = py::call_guard<py::gil_scoped_release>;

// A Python callable that C++ may copy and drop on any thread.
std::shared_ptr<py::function> shared_function(py::function function) {
  return {new py::function(std::move(function)), [](py::function* pointer) {
            const py::gil_scoped_acquire gil;
            delete pointer;
          }};
}

LogSink make_log_sink(py::function log) {
  return [log = shared_function(std::move(log))](LogLevel level, const std::string& message) {
    const py::gil_scoped_acquire gil;
    (*log)(level == LogLevel::kWarning, message);
  };
}

Connect make_connect(std::optional<py::function> connect) {
  if (!connect) return nullptr;
  return [connect = shared_function(std::move(*connect))](const auto&... arguments) {
    const py::gil_scoped_acquire gil;
    try {
      return (*connect)(arguments...).template cast<c10::intrusive_ptr<c10d::Backend>>();
    } catch (const py::error_already_set& error) {
      throw std::runtime_error(py::str(error.value()));  // without the lines of Python's stack
    }
  };
}

}  // namespace

void register_backend(py::module_& module) {
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using Inner = std::tuple<std::string, BackendPtr, std::optional<py::function>, StorePtr>;
  py::class_<BackendOptions, c10::intrusive_ptr<BackendOptions>, c10d::Backend::Options>(
      module, "BackendOptions")
      .def_readwrite("compression", &BackendOptions::compression)
      .def("__copy__",
           [](const BackendOptions& self) { return c10::make_intrusive<BackendOptions>(self); })
      .def("__deepcopy__", [](const BackendOptions& self, const py::dict&) {
        return c10::make_intrusive<BackendOptions>(self);
      });
  BackendClass(module, "BackendPowerSGD")
      .def(py::init([](int rank, int size, const std::vector<Inner>& inners, const Options& options,
                       py::function log, std::vector<int> hosts) {
             std::vector<InnerAndConnect> all;
             for (const auto& [device, inner, connect, store] : inners) {
               all.push_back({at::Device(device).type(), inner, make_connect(connect), store});
             }
             return c10::make_intrusive<BackendPowerSGD>(rank, size, std::move(all), options,
                                                         make_log_sink(std::move(log)),
                                                         std::move(hosts));
           }),
           py::arg("rank"), py::arg("size"), py::arg("inners"), py::arg("options"), py::arg("log"),
           py::arg("hosts"))
      .def_property_readonly("hosts",
                             [](const BackendPowerSGD& self) { return self.session()->hosts(); })
      .def_property_readonly("options", &BackendPowerSGD::getBackendOptions)
      .def_property_readonly("ended", &BackendPowerSGD::ended)
      .def("get_error", &BackendPowerSGD::getError, NoGil())
      .def("stats",
           [](BackendPowerSGD& self) {
             return stats_dict([&] { return self.session()->snapshot(); });
           })
      .def("compressing", [](const BackendPowerSGD& self) { return self.session()->compressing(); })
      .def("starts_at", [](const BackendPowerSGD& self) { return self.session()->starts_at(); })
      .def(
          "not_started",
          [](BackendPowerSGD& self, int64_t soon) { return self.session()->not_started(soon); },
          py::arg("soon") = 0)
      // torch calls it on the parent for ranks that are not in a new group; only NCCL needs it.
      .def("perform_nocolor_split", [](BackendPowerSGD&, const at::Device&) {})
      .def(
          "_call_at_stages",
          [](BackendPowerSGD& self, py::function probe) {
            self.session()->set_stage_probe(
                [probe = shared_function(std::move(probe))](const char* reached, int64_t bucket) {
                  const py::gil_scoped_acquire gil;
                  (*probe)(reached, bucket);
                });
          },
          "Calls probe(reached, bucket) as stage_probe.h says. It must not raise. For benchmarks.");
  module.def("shutdown_at_exit", &shutdown_at_exit, NoGil());
  module.def("push_override", &push_override);
  module.def("pop_override", &pop_override);
}

}  // namespace powersgd
