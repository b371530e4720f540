// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <type_traits>

#include "kernels/cuda/block_tiles.h"
#include "kernels/cuda/launch.cuh"

// Picks the kernels that a stage runs, by the ranks and dtypes of the bucket.

namespace powersgd::kernels::cuda {

constexpr int kNoProducts = 0;  // the R of kernels that do all but the products

// Calls on_rank(R), R a std::integral_constant: the first of kRanks, in rising order, that no rank
// of the bucket exceeds. kNoProducts serves any rank.
template <int... kRanks, typename OnRank>
Status with_rank(const Bucket& bucket, const OnRank& on_rank) {
  Status status = cudaErrorInvalidConfiguration;
  (void)(((kRanks == kNoProducts || bucket.largest_rank <= kRanks) &&
          (status = on_rank(std::integral_constant<int, kRanks>()), true)) ||
         ...);
  return status;
}

template <typename Launch, typename G, typename M>
Status dispatch_rank(const Bucket& bucket, Stream stream) {
  return with_rank<1, 2, 4, 8, 16, kMaxRank, kNoProducts>(
      bucket, [&](auto rank) { return Launch::template run<rank, G, M>(bucket, stream); });
}

// Runs Launch::run<R, G, M> of a stage that reads the gradient and memory. It serves ranks up to R.
// G and M say how the gradient and memory are stored.
template <typename Launch>
Status dispatch(const Bucket& bucket, Stream stream) {
  const bool wide_gradient = bucket.gradient_dtype == DType::kFloat32;
  const bool wide_memory = bucket.residual_dtype == DType::kFloat32;
  if (wide_gradient)
    return wide_memory ? dispatch_rank<Launch, float, float>(bucket, stream)
                       : dispatch_rank<Launch, float, uint16_t>(bucket, stream);
  return wide_memory ? dispatch_rank<Launch, uint16_t, float>(bucket, stream)
                     : dispatch_rank<Launch, uint16_t, uint16_t>(bucket, stream);
}

}  // namespace powersgd::kernels::cuda
