// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <cstddef>

#include "kernels/runners/stage_runner.h"

// The launchers of the CUDA kernels, which a GPU or the SIMT runtime executes.
namespace powersgd::test {

inline kernels::cuda::Status launch(Stage stage, const kernels::Bucket& bucket,
                                    kernels::cuda::Stream stream) {
  using namespace kernels::cuda;
  constexpr std::array kLaunchers{&random_start, &project, &orthogonalize, &back_project,
                                  &reconstruct};
  return kLaunchers[static_cast<size_t>(stage)](bucket, stream);
}

inline kernels::cuda::Status launch(PacketStage stage, const kernels::Packets& packets,
                                    kernels::cuda::Stream stream) {
  using namespace kernels::cuda;
  constexpr std::array kLaunchers{&quantize, &requantize, &dequantize};
  return kLaunchers[static_cast<size_t>(stage)](packets, stream);
}

}  // namespace powersgd::test
