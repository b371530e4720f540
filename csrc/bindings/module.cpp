// SPDX-License-Identifier: BSD-3-Clause
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/extension.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "bindings/gil.h"
#include "engine/callback_threads.h"
#include "engine/thread_engine.h"
#include "powersgd/attached_model.h"
#include "powersgd/backend.h"
#include "powersgd/compressor.h"
#include "powersgd/ddp_hook.h"
#include "powersgd/interpreter.h"
#include "powersgd/options.h"
#include "powersgd/plan.h"
#include "powersgd/scope_override.h"
#include "powersgd/stats.h"

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

std::optional<std::string> optional_name(const std::optional<DType>& dtype) {
  if (!dtype) return std::nullopt;
  return to_string(*dtype);
}

void bind_options(py::module_& module) {
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

void bind_plan(py::module_& module) {
  module.def("matrix_shape", [](std::vector<int64_t> sizes, std::vector<int64_t> strides) {
    const MatrixShape shape = matrix_shape({std::move(sizes), std::move(strides)});
    return std::make_pair(shape.rows, shape.cols);
  });
  module.def("effective_rank", [](int64_t rows, int64_t cols, const Options& options) {
    return effective_rank({rows, cols}, options);
  });
  module.def("should_compress", [](int64_t rows, int64_t cols, const Options& options) {
    return should_compress({rows, cols}, options);
  });
}

// The stages without a backend, for benchmarks and tests.
void bind_compressor(py::module_& module) {
  module.def("has_kernels",
             [](const std::string& device) { return has_kernels(at::Device(device).type()); });
  py::class_<BucketCompressor>(module, "BucketCompressor")
      .def(py::init([](const std::vector<std::vector<int64_t>>& shapes, const Options& options,
                       const py::object& dtype, const std::string& device) {
             std::vector<ParameterShape> bucket;
             for (const auto& sizes : shapes) bucket.push_back({sizes, {}});
             BucketPlan plan = plan_bucket(bucket, options);
             std::vector<ParameterStatePtr> states;
             for (size_t i = 0; i < plan.matrices.size(); ++i) {
               states.push_back(std::make_shared<ParameterState>(i));
             }
             return make_compressor(std::move(plan), std::move(states), options,
                                    torch::python::detail::py_object_to_dtype(dtype),
                                    at::Device(device));
           }),
           py::arg("shapes"), py::arg("options"), py::arg("dtype"), py::arg("device") = "cpu")
      .def(
          "project",
          [](BucketCompressor& self, const at::Tensor& gradient, uint64_t step, double output_scale,
             double grad_scale) {
            return self.project(gradient, {output_scale, grad_scale, step});
          },
          py::arg("gradient"), py::arg("step"), py::arg("output_scale") = 1.0,
          py::arg("grad_scale") = 1.0, NoGil())
      .def("orthogonalize", &BucketCompressor::orthogonalize, NoGil())
      .def("back_project", &BucketCompressor::back_project, NoGil())
      .def("reconstruct", &BucketCompressor::reconstruct, NoGil())
      .def("rollback", &BucketCompressor::rollback, NoGil())
      .def_property_readonly("sends",
                             [](const BucketCompressor& self) {
                               constexpr std::array<const char*, 3> kNames = {"PQ", "P", "Q"};
                               return kNames[static_cast<size_t>(self.sends())];
                             })
      .def_property_readonly("payload_bytes", &BucketCompressor::payload_bytes)
      .def_property_readonly("gradient_bytes", &BucketCompressor::gradient_bytes);
}

py::dict to_dict(const StatsSnapshot& stats) {
  py::dict seconds;
  for (int i = 0; i < kStages; ++i) {
    seconds[to_string(static_cast<Stage>(i))] = stats.seconds[static_cast<size_t>(i)];
  }
  py::dict result;
  result["steps"] = stats.steps;
  result["skipped_steps"] = stats.skipped_steps;
  result["saturated_steps"] = stats.saturated_steps;
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

void bind_backend(py::module_& module) {
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using Inner = std::tuple<std::string, BackendPtr, std::vector<BackendPtr>>;
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
                       py::function log) {
             std::vector<InnerAndChannels> all;
             for (const auto& [device, inner, channels] : inners) {
               all.push_back({at::Device(device).type(), inner, channels});
             }
             return c10::make_intrusive<BackendPowerSGD>(rank, size, std::move(all), options,
                                                         make_log_sink(std::move(log)));
           }),
           py::arg("rank"), py::arg("size"), py::arg("inners"), py::arg("options"), py::arg("log"))
      .def_property_readonly("options", &BackendPowerSGD::getBackendOptions)
      .def_property("grad_scale", &BackendPowerSGD::grad_scale, &BackendPowerSGD::set_grad_scale)
      .def("stats",
           [](BackendPowerSGD& self) {
             StatsSnapshot stats;
             {
               const py::gil_scoped_release no_gil;
               stats = self.snapshot();
             }
             return to_dict(stats);
           })
      .def("reset_stats", &BackendPowerSGD::reset_stats, NoGil())
      .def("compressing", &BackendPowerSGD::compressing)
      .def("starts_at", &BackendPowerSGD::starts_at)
      .def("not_started", &BackendPowerSGD::not_started, py::arg("soon") = 0)
      .def("models", &BackendPowerSGD::models, NoGil())
      // torch calls it on the parent for ranks that are not in a new group; only NCCL needs it.
      .def("perform_nocolor_split", [](BackendPowerSGD&, const at::Device&) {})
      .def(
          "_fail_at",
          [](BackendPowerSGD& self, const std::string& stage) {
            self.set_stage_probe([stage](const char* reached) {
              if (stage == reached) throw std::runtime_error("injected failure in " + stage);
            });
          },
          "Makes every step fail before `stage`; '' ends it. For tests.");
  module.def(
      "shutdown_at_exit",
      [] {
        shutdown_all_engines();
        end_callbacks();
      },
      NoGil());
}

void bind_model(py::module_& module) {
  py::class_<ParameterExport>(module, "ParameterExport")
      .def(py::init<>())
      .def_readwrite("name", &ParameterExport::name)
      .def_readwrite("residual", &ParameterExport::residual)
      .def_readwrite("q", &ParameterExport::q)
      .def_readwrite("p", &ParameterExport::p);
  py::class_<LocalExport>(module, "LocalExport")
      .def(py::init<>())
      .def_readwrite("name", &LocalExport::name)
      .def_readwrite("memory", &LocalExport::memory)
      .def_readwrite("p_hat", &LocalExport::p_hat)
      .def_readwrite("q_local", &LocalExport::q_local)
      .def_readwrite("q_warm", &LocalExport::q_warm)
      .def_readwrite("p_local", &LocalExport::p_local)
      .def_readwrite("sent_p", &LocalExport::sent_p)
      .def_readwrite("grad_scale", &LocalExport::grad_scale);
  py::class_<Outline>(module, "Outline")
      .def_readonly("parameters", &Outline::parameters)
      .def_readonly("compressed_parameters", &Outline::compressed_parameters)
      .def_readonly("numel", &Outline::numel)
      .def_readonly("compressed_numel", &Outline::compressed_numel)
      .def_readonly("sent_numel", &Outline::sent_numel)
      .def_readonly("bytes_before", &Outline::bytes_before)
      .def_readonly("bytes_after", &Outline::bytes_after);
  py::class_<AttachedModel, std::shared_ptr<AttachedModel>>(module, "AttachedModel")
      .def(py::init([](c10::intrusive_ptr<BackendPowerSGD> backend, std::vector<std::string> names,
                       std::vector<at::Tensor> parameters, const Options& options) {
             auto model = std::make_shared<AttachedModel>(std::move(backend), std::move(names),
                                                          std::move(parameters), options);
             model->backend()->add_model(model);
             return model;
           }),
           py::arg("backend"), py::arg("names"), py::arg("parameters"), py::arg("options"))
      .def("reduce", &AttachedModel::reduce, py::arg("bucket"), py::arg("buffer"),
           py::arg("parameters"), py::arg("divisor"), NoGil())
      .def("reduce_bucket", &reduce_bucket, py::arg("reducer"), py::arg("bucket"), NoGil())
      .def("end_step", &AttachedModel::end_step, NoGil())
      .def("outline", &AttachedModel::outline)
      .def_property("active", &AttachedModel::active, &AttachedModel::set_active)
      .def_property_readonly("step", &AttachedModel::step)
      .def_property("grad_scale", &AttachedModel::grad_scale, &AttachedModel::set_grad_scale)
      .def_property_readonly("options", &AttachedModel::options)
      .def("export_state", &AttachedModel::export_state, NoGil())
      .def("check_state", &AttachedModel::check_state, py::arg("saved"), NoGil())
      .def("load_state", &AttachedModel::load_state, py::arg("saved"), py::arg("step"),
           py::arg("grad_scale"), NoGil())
      .def("export_local", &AttachedModel::export_local, NoGil())
      .def("check_local", &AttachedModel::check_local, py::arg("saved"), NoGil())
      .def("load_local", &AttachedModel::load_local, py::arg("saved"), py::arg("step"), NoGil())
      .def(
          "step_skipped",
          [](AttachedModel& self, const std::optional<at::Tensor>& dropped) {
            self.step_skipped(dropped.value_or(at::Tensor()));
          },
          py::arg("dropped") = std::nullopt, NoGil())
      .def("residual_norms", &AttachedModel::residual_norms, NoGil());
  module.def("register_ddp_hook", &register_ddp_hook, py::arg("reducer"), py::arg("model"));
}

}  // namespace
}  // namespace powersgd

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace powersgd;
  set_run_unlocked(&without_gil);
  module.attr("torch_version") = POWERSGD_TORCH_VERSION;
  bind_options(module);
  bind_plan(module);
  bind_compressor(module);
  bind_backend(module);
  bind_model(module);
  module.def("push_override", &push_override);
  module.def("pop_override", &pop_override);
}
