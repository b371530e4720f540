// SPDX-License-Identifier: BSD-3-Clause
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/register.h"
#include "powersgd/attached_model.h"
#include "powersgd/backend.h"
#include "powersgd/ddp_hook.h"
#include "powersgd/named_tensors.h"
#include "powersgd/options.h"
#include "powersgd/reducer_members.h"

namespace py = pybind11;

namespace powersgd {
py::dict to_dict(const StatsSnapshot& stats);
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

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
  py::class_<AttachedModel, std::shared_ptr<AttachedModel>>(module, "AttachedModel")
      .def(py::init([](const BackendPowerSGD& backend, std::vector<std::string> names,
                       const std::vector<at::Tensor>& parameters, const Options& options) {
             return AttachedModel::attach(backend.session(), std::move(names), parameters, options);
           }),
           py::arg("backend"), py::arg("names"), py::arg("parameters"), py::arg("options"), NoGil())
      .def(
          "reduce",
          [](AttachedModel& self, size_t bucket, at::Tensor buffer,
             const std::vector<size_t>& parameters,
             int divisor) { return self.reduce(bucket, buffer, parameters, divisor); },
          py::arg("bucket"), py::arg("buffer"), py::arg("parameters"), py::arg("divisor"), NoGil())
      .def("expect", &AttachedModel::expect, py::arg("bucket"), py::arg("buffer"),
           py::arg("parameters"), py::arg("divided_after"))
      .def("end_step", &AttachedModel::end_step, NoGil())
      .def("outline", &AttachedModel::outline)
      .def_property_readonly("compresses", &AttachedModel::compresses)
      .def_property("active", &AttachedModel::active, &AttachedModel::set_active)
      .def_property_readonly("step", &AttachedModel::step)
      .def_property("grad_scale", &AttachedModel::grad_scale, &AttachedModel::set_grad_scale)
      .def_property(
          "loss_scale",
          [](const AttachedModel& self) {
            return self.loss_scale().defined() ? std::optional(self.loss_scale()) : std::nullopt;
          },
          [](AttachedModel& self, const std::optional<at::Tensor>& scale) {
            self.set_loss_scale(scale.value_or(at::Tensor()));
          })
      .def_property_readonly("names", &AttachedModel::names)
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
          [](AttachedModel& self, const std::optional<at::Tensor>& dropped,
             const std::vector<size_t>& parameters) {
            self.step_skipped(dropped.value_or(at::Tensor()), parameters);
          },
          py::arg("dropped") = std::nullopt, py::arg("parameters") = std::vector<size_t>(), NoGil())
      .def("discard_step", &AttachedModel::discard_step, NoGil())
      .def("layers", &AttachedModel::layers, NoGil())
      .def("stats", [](AttachedModel& self) {
             StatsSnapshot stats;
             {
               const py::gil_scoped_release no_gil;
               stats = self.session().snapshot();
             }
             return to_dict(stats);
           })
      .def("reset_stats", [](AttachedModel& self) { self.session().reset_stats(); }, NoGil())
      .def("detach", [](AttachedModel& self) { self.set_active(false); })
      .def_property_readonly("compressing", [](AttachedModel& self) { return self.session().compressing(); })
      .def_property_readonly("starts_at", [](AttachedModel& self) { return self.session().starts_at(); })
      .def_property_readonly("detached", [](AttachedModel& self) { return !self.active(); })
      .def_property_readonly("on_cpu", [](AttachedModel& self) { return true; })
      .def("not_started", [](AttachedModel& self, int64_t soon) { return self.session().not_started(soon); });
  py::class_<NamedTensors>(module, "NamedTensors")
      .def(py::init<std::shared_ptr<AttachedModel>, size_t>(), py::arg("model"),
           py::arg("bucket_bytes"), NoGil())
      .def("all_reduce", &NamedTensors::all_reduce, py::arg("tensors"), NoGil());
  py::class_<DdpBuckets>(module, "DdpBuckets")
      .def(py::init<std::shared_ptr<AttachedModel>, const c10d::Reducer&>(), py::arg("model"),
           py::arg("reducer"))
      .def(
          "reduce",
          [](DdpBuckets& self, const c10d::Reducer& reducer, c10d::GradBucket& bucket) {
            return self.reduce(reducer, bucket);
          },
          py::arg("reducer"), py::arg("bucket"), NoGil());
  module.def("register_ddp_hook", &register_ddp_hook, py::arg("reducer"), py::arg("model"));
  module.def("reduced_parameters", &ReducerMembers::parameters, py::arg("reducer"));
  module.def("converted_parameter", &ReducerMembers::converted_parameter, py::arg("reducer"));
  module.def("synchronized_passes", &ReducerMembers::synchronized_passes, py::arg("reducer"));
}

}  // namespace powersgd
