// SPDX-License-Identifier: BSD-3-Clause
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/register.h"
#include "bindings/stats.h"
#include "powersgd/core/options.h"
#include "powersgd/group/backend.h"
#include "powersgd/model/bucket_reducer.h"
#include "powersgd/model/ddp_hook.h"
#include "powersgd/model/model_states.h"
#include "powersgd/model/named_tensors.h"
#include "powersgd/model/outline.h"
#include "powersgd/model/reducer_members.h"

namespace py = pybind11;

namespace powersgd {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

void register_states(py::module_& module) {
  py::class_<ModelStates, std::shared_ptr<ModelStates>>(module, "ModelStates")
      .def_property_readonly("names",
                             [](const ModelStates& self) { return self.parameters().names(); })
      .def_property_readonly("options", &ModelStates::options)
      .def_property_readonly("compresses", &ModelStates::compresses)
      .def_property_readonly("step", &ModelStates::step)
      .def_property("grad_scale", py::cpp_function(&ModelStates::grad_scale, NoGil()),
                    py::cpp_function(&ModelStates::set_grad_scale, NoGil()))
      .def_property("loss_scale", &ModelStates::loss_scale, &ModelStates::set_loss_scale)
      .def("outline",
           [](const ModelStates& self) { return outline_of(self.parameters(), self.options()); })
      .def("export_state", &ModelStates::export_state, NoGil())
      .def("check_state", &ModelStates::check_state, py::arg("saved"), NoGil())
      .def("load_state", &ModelStates::load_state, py::arg("saved"), py::arg("step"),
           py::arg("grad_scale"), NoGil())
      .def("export_local", &ModelStates::export_local, NoGil())
      .def("check_local", &ModelStates::check_local, py::arg("saved"), NoGil())
      .def("load_local", &ModelStates::load_local, py::arg("saved"), py::arg("step"), NoGil())
      .def(
          "step_skipped",
          [](ModelStates& self, const std::optional<at::Tensor>& dropped,
             const std::vector<size_t>& parameters) {
            self.step_skipped(dropped.value_or(at::Tensor()), parameters);
          },
          py::arg("dropped") = std::nullopt, py::arg("parameters") = std::vector<size_t>(), NoGil())
      .def("discard_step", &ModelStates::discard_step, NoGil())
      .def("residuals", &ModelStates::residuals, NoGil())
      .def("take_residuals", &ModelStates::take_residuals, py::arg("share"), py::arg("parameters"),
           NoGil())
      .def("agree_with", &ModelStates::agree_with, py::arg("source"), py::arg("step"), NoGil())
      .def("layers", &ModelStates::layers, NoGil());
}

void register_reducer(py::module_& module) {
  py::class_<BucketReducer, std::shared_ptr<BucketReducer>>(module, "BucketReducer")
      .def(py::init([](const BackendPowerSGD& backend, std::vector<std::string> names,
                       const std::vector<at::Tensor>& parameters, const Options& options,
                       const BucketReducer* previous) {
             return BucketReducer::make(backend.session(), std::move(names), parameters, options,
                                        previous);
           }),
           py::arg("backend"), py::arg("names"), py::arg("parameters"), py::arg("options"),
           py::arg("previous") = nullptr, NoGil())
      .def("note_attached", &BucketReducer::note_attached)
      .def_property_readonly("states", &BucketReducer::states)
      .def(
          "reduce",
          [](BucketReducer& self, size_t bucket, at::Tensor buffer,
             const std::vector<size_t>& parameters,
             int divisor) { return self.reduce(bucket, buffer, parameters, divisor); },
          py::arg("bucket"), py::arg("buffer"), py::arg("parameters"), py::arg("divisor"), NoGil())
      .def("expect", &BucketReducer::expect, py::arg("bucket"), py::arg("buffer"),
           py::arg("parameters"), py::arg("divided_after"))
      .def("end_step", &BucketReducer::end_step, NoGil())
      .def_property("active", &BucketReducer::active, &BucketReducer::set_active)
      .def("detach", &BucketReducer::detach, NoGil())
      .def_property_readonly("detached", &BucketReducer::detached)
      .def("stats", [](BucketReducer& self) { return stats_dict([&] { return self.snapshot(); }); })
      .def("reset_stats", &BucketReducer::reset_stats, NoGil())
      .def_property_readonly("compressing", &BucketReducer::compressing)
      .def_property_readonly("starts_at", &BucketReducer::starts_at)
      .def("not_started", &BucketReducer::not_started, py::arg("soon") = 0);
}

}  // namespace

void register_model(py::module_& module) {
  py::class_<ParameterExport>(module, "ParameterExport")
      .def(py::init<>())
      .def_readwrite("name", &ParameterExport::name)
      .def_readwrite("residual", &ParameterExport::residual)
      .def_readwrite("q", &ParameterExport::q);
  py::class_<LocalExport>(module, "LocalExport")
      .def(py::init<>())
      .def_readwrite("name", &LocalExport::name)
      .def_readwrite("memory", &LocalExport::memory)
      .def_readwrite("p_hat", &LocalExport::p_hat)
      .def_readwrite("q_local", &LocalExport::q_local)
      .def_readwrite("q_warm", &LocalExport::q_warm)
      .def_readwrite("grad_scale", &LocalExport::grad_scale);
  py::class_<Outline>(module, "Outline")
      .def_readonly("parameters", &Outline::parameters)
      .def_readonly("compressed_parameters", &Outline::compressed_parameters)
      .def_readonly("numel", &Outline::numel)
      .def_readonly("compressed_numel", &Outline::compressed_numel)
      .def_readonly("sent_numel", &Outline::sent_numel)
      .def_readonly("bytes_before", &Outline::bytes_before)
      .def_readonly("bytes_after", &Outline::bytes_after);
  py::class_<LayerStats>(module, "LayerStats")
      .def_readonly("name", &LayerStats::name)
      .def_property_readonly("rows", [](const LayerStats& self) { return self.shape.rows; })
      .def_property_readonly("cols", [](const LayerStats& self) { return self.shape.cols; })
      .def_readonly("rank", &LayerStats::rank)
      .def_readonly("bytes_before", &LayerStats::bytes_before)
      .def_readonly("bytes_after", &LayerStats::bytes_after)
      .def_readonly("residual", &LayerStats::residual)
      .def_readonly("gradient", &LayerStats::gradient)
      .def_readonly("captured", &LayerStats::captured);
  register_states(module);
  register_reducer(module);
  py::class_<DdpBuckets>(module, "DdpBuckets")
      .def(py::init<std::shared_ptr<BucketReducer>, const c10d::Reducer&>(), py::arg("buckets"),
           py::arg("reducer"))
      .def(
          "reduce",
          [](DdpBuckets& self, const c10d::Reducer& reducer, c10d::GradBucket& bucket) {
            return self.reduce(reducer, bucket);
          },
          py::arg("reducer"), py::arg("bucket"), NoGil())
      .def(
          "sum",
          [](DdpBuckets& self, const c10d::Reducer& reducer, size_t number, at::Tensor buffer) {
            return self.sum(reducer, number, buffer);
          },
          py::arg("reducer"), py::arg("number"), py::arg("buffer"), NoGil());
  py::class_<NamedTensors>(module, "NamedTensors")
      .def(py::init<std::shared_ptr<BucketReducer>, size_t>(), py::arg("reducer"),
           py::arg("bucket_bytes"), NoGil())
      .def_property_readonly("buckets", &NamedTensors::buckets)
      .def("all_reduce", &NamedTensors::all_reduce, py::arg("tensors"),
           py::arg("find_absent") = nullptr, NoGil())
      .def("sum", &NamedTensors::sum, py::arg("tensors"), NoGil());
  module.def("is_attached", &is_attached, py::arg("reducer"));
  module.def("register_ddp_hook", &register_ddp_hook, py::arg("reducer"), py::arg("buckets"));
  module.def("reduced_parameters", &ReducerMembers::parameters, py::arg("reducer"));
  module.def("bucket_in", &ReducerMembers::bucket_in, py::arg("reducer"), py::arg("buffer"));
  module.def("converted_parameter", &ReducerMembers::converted_parameter, py::arg("reducer"));
  module.def("synchronized_passes", &ReducerMembers::synchronized_passes, py::arg("reducer"));
}

}  // namespace powersgd
