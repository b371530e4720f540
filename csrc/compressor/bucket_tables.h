// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "compressor/stages.h"
#include "powersgd/kernels.h"

namespace powersgd {

at::Tensor upload_matrices(const std::vector<kernels::Matrix>& matrices, at::Device device);

// Points `bucket` at copies of the tables on `device`, and at a workspace. Returns the tensors that
// own them: the caller keeps them for as long as it uses the bucket.
std::vector<at::Tensor> set_tables(kernels::Bucket& bucket, const Stages& stages,
                                   const std::vector<kernels::Matrix>& matrices,
                                   const std::vector<kernels::RawSegment>& raw, at::Device device);

}  // namespace powersgd
