// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <type_traits>

#include "kernels/cuda/block_tiles.h"
#include "kernels/cuda/launch.cuh"

// Picks the kernels that a stage runs, by the ranks and dtypes of the bucket.

namespace powersgd::kernels::cuda {

constexpr int kPlainRanks = 4;  // rows of a factor that a kernel of any rank takes at a time

// Calls on_rank(R), R a std::integral_constant: the first of kRanks, in rising order, that no rank
// of the bucket exceeds. R is 0 if there is none.
template <int... kRanks, typename OnRank>
Status with_rank(const Bucket& bucket, const OnRank& on_rank) {
  Status status = 0;
  const bool found = ((bucket.largest_rank <= kRanks &&
                       (status = on_rank(std::integral_constant<int, kRanks>()), true)) ||
                      ...);
  return found ? status : on_rank(std::integral_constant<int, 0>());
}

template <typename Launch, typename G, typename M>
Status dispatch_rank(const Bucket& bucket, Stream stream) {
  return with_rank<1, 2, 4, 8, 16, 32>(bucket, [&](auto rank) {
    if constexpr (rank == 0)
      return Launch::template run<kPlainRanks, true, float, G, M>(bucket, stream);
    else
      return Launch::template run<rank, false, float, G, M>(bucket, stream);
  });
}

// Runs Launch::run<R, kAnyRank, F, G, M> of a stage that reads the gradient and memory. It serves
// ranks up to R, or any rank. F, G and M say how the factors, the gradient and memory are stored.
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
