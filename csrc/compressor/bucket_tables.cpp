// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/bucket_tables.h"

#include <ATen/ATen.h>

#include <cstring>

namespace powersgd {
namespace {

template <typename T>
at::Tensor upload(const std::vector<T>& table, at::Device device) {
  at::Tensor host = at::empty({static_cast<int64_t>(table.size() * sizeof(T))}, at::kByte);
  if (!table.empty()) std::memcpy(host.data_ptr(), table.data(), table.size() * sizeof(T));
  return host.to(device);
}

template <typename T>
const T* table_ptr(const at::Tensor& tensor) {
  return static_cast<const T*>(tensor.data_ptr());
}

}  // namespace

at::Tensor upload_matrices(const std::vector<kernels::Matrix>& matrices, at::Device device) {
  return upload(matrices, device);
}

std::vector<at::Tensor> set_tables(kernels::Bucket& bucket, const Stages& stages,
                                   const std::vector<kernels::Matrix>& matrices,
                                   const std::vector<kernels::RawSegment>& raw, at::Device device) {
  const kernels::TileTable tiles = stages.make_tiles(matrices, raw, bucket.factor_dtype);
  const auto workspace = at::device(device).dtype(at::kByte);
  std::vector<at::Tensor> owned = {
      upload(matrices, device), upload(raw, device), upload(tiles.tiles, device),
      at::empty({static_cast<int64_t>(tiles.workspace_bytes)}, workspace)};
  bucket.matrices = table_ptr<kernels::Matrix>(owned[0]);
  bucket.raw_segments = table_ptr<kernels::RawSegment>(owned[1]);
  bucket.tiles = table_ptr<kernels::Tile>(owned[2]);
  bucket.workspace = owned[3].data_ptr();
  bucket.num_matrices = static_cast<int32_t>(matrices.size());
  bucket.num_raw_segments = static_cast<int32_t>(raw.size());
  bucket.tile_list_begin = tiles.list_begin;
  bucket.largest_rank = tiles.largest_rank;
  return owned;
}

}  // namespace powersgd
