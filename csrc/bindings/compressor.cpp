// SPDX-License-Identifier: BSD-3-Clause
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/register.h"
#include "powersgd/compressor/compressor.h"
#include "powersgd/compressor/dtypes.h"
#include "powersgd/compressor/traffic.h"
#include "powersgd/core/options.h"
#include "powersgd/core/plan.h"
#include "powersgd/kernels/kernels.h"

namespace py = pybind11;

namespace powersgd {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// The matrix ranks that parameters have of their own: for each of them, or empty.
using OwnRanks = std::vector<std::optional<int64_t>>;

BucketPlan plan_of(const std::vector<std::vector<int64_t>>& shapes, const Options& options,
                   at::ScalarType dtype, const OwnRanks& ranks = {}) {
  std::vector<ParameterShape> bucket;
  for (size_t i = 0; i < shapes.size(); ++i) {
    bucket.push_back({shapes[i], {}, !is_compressible(dtype)});
    if (!ranks.empty()) bucket.back().rank = ranks.at(i);
  }
  return plan_bucket(bucket, options);
}

// NCCL sums on GPUs, and this project's packets elsewhere. Each host has `per_host` ranks.
Ranks ranks_on(c10::DeviceType device, int32_t count, int32_t per_host) {
  std::vector<int> hosts;
  for (int32_t rank = 0; rank < count; ++rank) hosts.push_back(rank / per_host);
  return {0, count, /*backend_sums=*/device == c10::DeviceType::CUDA, /*schedule=*/{},
          levels_of(hosts, 0)};
}

// The launches of CUDA kernels since the start of the process: 0 in a build without them.
int64_t cuda_launch_count() {
#ifdef POWERSGD_WITH_CUDA
  return kernels::cuda::launch_count();
#else
  return 0;
#endif
}

}  // namespace

void register_plan(py::module_& module) {
  module.def("matrix_shape", [](std::vector<int64_t> sizes, std::vector<int64_t> strides) {
    const MatrixShape shape = matrix_shape({std::move(sizes), std::move(strides)});
    return std::make_pair(shape.rows, shape.cols);
  });
  module.def("is_compressible", &is_compressible);
  module.def(
      "matrix_rank",
      [](std::vector<int64_t> sizes, const Options& options, at::ScalarType dtype,
         std::optional<int64_t> rank) {
        return sent_numel({std::move(sizes), {}, !is_compressible(dtype), rank}, options).rank;
      },
      py::arg("shape"), py::arg("options"), py::arg("dtype"), py::arg("rank") = py::none());
}

void register_stages(py::module_& module) {
  module.def("has_kernels",
             [](const std::string& device) { return has_kernels(at::Device(device).type()); });
  py::class_<MemoryNeeds>(module, "MemoryNeeds")
      .def_readonly("residual", &MemoryNeeds::residual)
      .def_readonly("factors", &MemoryNeeds::factors)
      .def_readonly("payloads", &MemoryNeeds::payloads)
      .def_readonly("tables", &MemoryNeeds::tables)
      .def_readonly("workspace", &MemoryNeeds::workspace);
  module.def(
      "memory_needs",
      [](const std::vector<std::vector<int64_t>>& shapes, const Options& options,
         at::ScalarType dtype, const std::string& device, int32_t world_size, int32_t per_host,
         const OwnRanks& ranks) {
        const c10::DeviceType type = at::Device(device).type();
        return memory_needs(plan_of(shapes, options, dtype, ranks), options, dtype, type,
                            ranks_on(type, world_size, per_host));
      },
      py::arg("shapes"), py::arg("options"), py::arg("dtype"), py::arg("device"),
      py::arg("world_size"), py::arg("per_host") = 1, py::arg("ranks") = OwnRanks{});
  py::class_<Traffic>(module, "Traffic")
      .def_property_readonly("schedule",
                             [](const Traffic& self) { return to_string(self.schedule); })
      .def_readonly("payload_bytes", &Traffic::payload_bytes)
      .def_readonly("sent_bytes", &Traffic::sent_bytes);
  module.def(
      "traffic_of",
      [](const std::vector<std::vector<int64_t>>& shapes, const Options& options,
         at::ScalarType dtype, const std::string& device, int32_t world_size, int32_t per_host,
         const OwnRanks& ranks) {
        const StepTraffic step =
            traffic_of(plan_of(shapes, options, dtype, ranks), options, dtype,
                       ranks_on(at::Device(device).type(), world_size, per_host));
        return std::make_pair(step.p, step.q);
      },
      py::arg("shapes"), py::arg("options"), py::arg("dtype"), py::arg("device"),
      py::arg("world_size"), py::arg("per_host") = 1, py::arg("ranks") = OwnRanks{});
  module.def(
      "content_bytes",
      [](const std::vector<std::vector<int64_t>>& shapes, const Options& options,
         at::ScalarType dtype, const OwnRanks& ranks) {
        return content_bytes(plan_of(shapes, options, dtype, ranks), options, dtype);
      },
      py::arg("shapes"), py::arg("options"), py::arg("dtype"), py::arg("ranks") = OwnRanks{});
  module.def("cpu_instruction_set", &kernels::cpu::instruction_set);
  module.def("cuda_launch_count", &cuda_launch_count);
  py::class_<BucketCompressor>(module, "BucketCompressor")
      .def(py::init([](const std::vector<std::vector<int64_t>>& shapes, const Options& options,
                       at::ScalarType dtype, const std::string& device) {
             BucketPlan plan = plan_of(shapes, options, dtype);
             std::vector<ParameterStatePtr> states;
             for (size_t i = 0; i < plan.matrices.size(); ++i) {
               states.push_back(std::make_shared<ParameterState>(i));
             }
             return make_compressor(std::move(plan), std::move(states), options, dtype,
                                    at::Device(device));
           }),
           py::arg("shapes"), py::arg("options"), py::arg("dtype"), py::arg("device") = "cpu")
      .def(
          "project",
          [](BucketCompressor& self, const at::Tensor& gradient, uint64_t step, double output_scale,
             double units) {
            return sum_alone(self.project(gradient, {output_scale, units, step}));
          },
          py::arg("gradient"), py::arg("step"), py::arg("output_scale") = 1.0,
          py::arg("units") = 1.0, NoGil())
      .def("orthogonalize", &BucketCompressor::orthogonalize, NoGil())
      .def(
          "back_project", [](BucketCompressor& self) { return sum_alone(self.back_project()); },
          NoGil())
      .def("reconstruct", &BucketCompressor::reconstruct, NoGil())
      .def("rollback", &BucketCompressor::rollback, NoGil())
      .def_property_readonly("payload_bytes", &BucketCompressor::payload_bytes)
      .def_property_readonly("gradient_bytes", &BucketCompressor::gradient_bytes);
}

}  // namespace powersgd
