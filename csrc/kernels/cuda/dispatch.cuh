// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "launch.cuh"
#include "tiles.h"

// Which of its kernels a stage that reads the gradient and the memory runs.

namespace powersgd::kernels::cuda {

constexpr int kPlainRanks = 4;  // ranks at a time in a kernel for any rank

template <typename Launch, typename G, typename M>
Status dispatch_rank(const Bucket& bucket, Stream stream) {
  switch (bucket.tile_list_begin[kRankClass + 1] - bucket.tile_list_begin[kRankClass]) {
    case 0:
      return Launch::template run<1, false, float, G, M>(bucket, stream);
    case 1:
      return Launch::template run<2, false, float, G, M>(bucket, stream);
    case 2:
      return Launch::template run<4, false, float, G, M>(bucket, stream);
    case 3:
      return Launch::template run<8, false, float, G, M>(bucket, stream);
    case 4:
      return Launch::template run<16, false, float, G, M>(bucket, stream);
    case 5:
      return Launch::template run<32, false, float, G, M>(bucket, stream);
    default:
      return Launch::template run<kPlainRanks, true, float, G, M>(bucket, stream);
  }
}

// Launch::run<R, kAnyRank, F, G, M>: for ranks up to R or any rank, and how the factors, the
// gradient and the memory are stored.
template <typename Launch>
Status dispatch(const Bucket& bucket, Stream stream) {
  if (bucket.factor_dtype == DType::kFloat64)
    return Launch::template run<kPlainRanks, true, double, double, double>(bucket, stream);
  const bool wide_gradient = bucket.gradient_dtype == DType::kFloat32;
  const bool wide_memory = bucket.residual_dtype == DType::kFloat32;
  if (wide_gradient)
    return wide_memory ? dispatch_rank<Launch, float, float>(bucket, stream)
                       : dispatch_rank<Launch, float, uint16_t>(bucket, stream);
  return wide_memory ? dispatch_rank<Launch, uint16_t, float>(bucket, stream)
                     : dispatch_rank<Launch, uint16_t, uint16_t>(bucket, stream);
}

}  // namespace powersgd::kernels::cuda
