// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cpu/simd/storage.h"
#include "powersgd/core/options.h"

namespace powersgd::kernels::cpu {

// Calls function(Storage{}) with the storage type of a dtype.
template <class Function>
void with_storage(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kFloat32:
      return function(float{});
    case DType::kBFloat16:
      return function(BFloat16{});
    case DType::kFloat16:
      return function(Half{});
  }
}

// The same for a residual, which is never in float16.
template <class Function>
void with_residual_storage(DType dtype, const Function& function) {
  if (dtype == DType::kBFloat16) return function(BFloat16{});
  function(float{});
}

// Calls function(G{}, R{}) with the storage types of gradient and residual.
template <class Function>
void with_storage_pair(DType gradient, DType residual, const Function& function) {
  with_storage(gradient,
               [&](auto g) { with_residual_storage(residual, [&](auto r) { function(g, r); }); });
}

}  // namespace powersgd::kernels::cpu
