// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <string>
#include <vector>

#include "cases.h"
#include "device.cuh"

// The results of bench_kernels.cu, as a table and as JSON.
namespace powersgd::bench {

inline void print_headings() {
  std::printf("%-16s %4s %-18s %-8s %8s %8s %8s %8s %9s %9s %7s %9s\n", "bucket", "rank",
              "gradient", "products", "project", "orthog.", "back", "reconst.", "step", "floor",
              "ratio", "launches");
}

inline void print(const Row& row) {
  const Case& of = row.measured;
  std::printf("%-16s %4ld %-18s %-8s %8.1f %8.1f %8.1f %8.1f %9.1f %9.1f %7.2f %9.1f%s\n",
              of.layout->title.c_str(), static_cast<long>(of.rank), of.kind->name.c_str(),
              of.products->name.c_str(), row.stage[0] * 1e3, row.stage[1] * 1e3, row.stage[2] * 1e3,
              row.stage[3] * 1e3, row.step * 1e3, row.floor * 1e3, row.step / row.floor,
              row.launches, row.skipped ? "  SKIPPED: the results are not finite" : "");
  std::fflush(stdout);
}

// A file is replaced atomically, so it is valid JSON at any time, even after a crash.
inline void write(const std::string& path, double copy, const std::vector<Row>& rows) {
  cudaDeviceProp device{};
  int runtime = 0, driver = 0;
  check(cudaGetDeviceProperties(&device, 0));
  check(cudaRuntimeGetVersion(&runtime));
  check(cudaDriverGetVersion(&driver));
  const std::string part = path + ".part";
  std::FILE* const file = std::fopen(part.c_str(), "w");
  if (!file) fail("cannot write " + part);
  std::fprintf(file,
               "{\n \"device\": \"%s\",\n \"capability\": \"%d.%d\",\n \"multiprocessors\": %d,\n"
               " \"cuda_runtime\": %d,\n \"cuda_driver\": %d,\n"
               " \"copy_tbyte_per_s\": %.4f,\n \"results\": [",
               device.name, device.major, device.minor, device.multiProcessorCount, runtime, driver,
               copy / 1e9);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    const Case& of = row.measured;
    std::fprintf(file,
                 "%s\n  {\"model\": \"%s\", \"rank\": %ld, \"kind\": \"%s\", \"products\": \"%s\","
                 " \"project_us\": %.2f, \"orthogonalize_us\": %.2f, \"back_project_us\": %.2f,"
                 " \"reconstruct_us\": %.2f, \"step_us\": %.2f, \"floor_us\": %.2f,"
                 " \"ratio\": %.4f, \"launches\": %.2f, \"skipped\": %d}",
                 i ? "," : "", of.layout->name.c_str(), static_cast<long>(of.rank),
                 of.kind->name.c_str(), of.products->name.c_str(), row.stage[0] * 1e3,
                 row.stage[1] * 1e3, row.stage[2] * 1e3, row.stage[3] * 1e3, row.step * 1e3,
                 row.floor * 1e3, row.step / row.floor, row.launches, row.skipped);
  }
  std::fprintf(file, "\n ]\n}\n");
  if (std::fclose(file) != 0 || std::rename(part.c_str(), path.c_str()) != 0)
    fail("cannot write " + path);
}

}  // namespace powersgd::bench
