// SPDX-License-Identifier: BSD-3-Clause
//
// The stages on a wire that rounds. Each runs the stage of the same name on payloads in the factor
// dtype (blocking/wire_room.h). project and back_project then round what they have written, and
// orthogonalize and reconstruct first widen what they read.
#include <cmath>
#include <type_traits>

#include "kernels/cpu/blocking/tiles.h"
#include "kernels/cpu/blocking/wire_room.h"
#include "kernels/cpu/largest.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/with_storage.h"
#include "kernels/shared/wire.h"

namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// Elements of a payload that one thread converts at a time.
constexpr int64_t kWireChunk = int64_t{1} << 14;

// Returns the first `count` elements of a payload as factors.
template <class F, class W>
inline Vector<F> load_wire(const W* source, int64_t count) {
  const Floats loaded = load_first(source, count);
  if constexpr (std::is_same_v<F, float>) {
    return loaded;
  } else {
    float lanes[kLanes<float>];
    store(lanes, loaded);
    return load_double(lanes);
  }
}

// Stores the first `count` values to a payload, and returns them as they were rounded. The way of
// doubles is through memory: GCC 12 takes a narrowing lane by lane and its reverse for nothing.
template <class W, class F>
inline Vector<F> store_wire(W* target, int64_t count, const Vector<F>& values) {
  if constexpr (std::is_same_v<F, float>) {
    return store_first(target, count, values);
  } else {
    float lanes[kLanes<float>] = {};
    store_double(lanes, values);
    store(lanes, store_first(target, count, load(lanes)));
    return load_double(lanes);
  }
}

template <class Body>
inline void for_each_chunk(int64_t numel, const ParallelFor& parallel_for, const Body& body) {
  if (numel == 0) return;
  parallel_for(ceil_div(numel, kWireChunk), [&](int64_t from, int64_t to) {
    for (int64_t chunk = from; chunk < to; ++chunk) {
      body(chunk * kWireChunk, std::min(kWireChunk, numel - chunk * kWireChunk));
    }
  });
}

// A bucket whose payloads are of W, and the same one with payloads of F.
template <class F, class W>
struct WirePayloads {
  const Bucket& wire;
  const Bucket& factors;
  const ParallelFor& parallel_for;

  // Rounds the values from `offset` on, times `scale`. Then on_sent(j, count, values) gets what was
  // sent of element j of the range and those after it, divided by the scale.
  template <class OnSent>
  POWERSGD_TILE_FUNCTION static void round(const F* values, W* target, int64_t numel, F scale,
                                           const OnSent& on_sent) {
    for_each_vector<F>(numel, [&](int64_t j, int64_t count) {
      const Vector<F> scaled = load_first(values + j, count) * scale;
      on_sent(j, count, store_wire<W, F>(target + j, count, scaled) / scale);
    });
  }

  // Sends elements [begin, end) of P.
  void send_p(int64_t begin, int64_t end, F scale) const {
    const F* values = elements<F>(factors.p_payload, begin);
    W* target = elements<W>(wire.p_payload, begin);
    for_each_chunk(end - begin, parallel_for, [&](int64_t offset, int64_t numel) {
      round(values + offset, target + offset, numel, scale,
            [](int64_t, int64_t, const Vector<F>&) {});
    });
  }

  void send_raw(F scale) const {
    F* exact = elements<F>(factors.p_payload, wire.raw_offset);
    W* target = elements<W>(wire.p_payload, wire.raw_offset);
    for_each_chunk(wire.counts_offset - wire.raw_offset, parallel_for,
                   [&](int64_t offset, int64_t numel) {
                     F* rounding = elements<F>(wire.rounding, offset);
                     add_rounding(exact + offset, rounding, numel);
                     keep_rounding(exact + offset, target + offset, rounding, numel, scale);
                   });
  }

  POWERSGD_TILE_FUNCTION void add_rounding(F* exact, const F* rounding, int64_t numel) const {
    if (wire.drop_residual) return;
    for_each_vector<F>(numel, [&](int64_t j, int64_t count) {
      store_first(exact + j, count, load_first(exact + j, count) + load_first(rounding + j, count));
    });
  }

  static void keep_rounding(const F* exact, W* target, F* rounding, int64_t numel, F scale) {
    round(exact, target, numel, scale, [&](int64_t j, int64_t count, const Vector<F>& sent) {
      store_first(rounding + j, count, finite_or_zero(load_first(exact + j, count) - sent));
    });
  }

  void send_q(F scale) const {
    for_each_tile(wire, kStripTiles, parallel_for, [&](const Tile& tile) {
      const Matrix& matrix = wire.matrices[tile.item];
      for (int64_t k = 0; k < matrix.rank; ++k) {
        const int64_t offset = k * matrix.cols + tile.col_begin;
        F* q_local = static_cast<F*>(matrix.q_local) + offset;
        round(elements<F>(factors.q_payload, matrix.q_offset + offset),
              elements<W>(wire.q_payload, matrix.q_offset + offset), tile.col_end - tile.col_begin,
              scale, [&](int64_t j, int64_t count, const Vector<F>& sent) {
                store_first(q_local + j, count, sent);
              });
      }
    });
  }

  // Returns the largest magnitude of what it has widened.
  double receive(const W* source, F* target, int64_t numel, F scale) const {
    Largest largest;
    for_each_chunk(numel, parallel_for, [&](int64_t offset, int64_t chunk_numel) {
      widen(source + offset, target + offset, chunk_numel, scale, largest);
    });
    return largest.get();
  }

  POWERSGD_TILE_FUNCTION static void widen(const W* source, F* target, int64_t numel, F scale,
                                           Largest& largest) {
    LargestOfLanes<F> of_lanes;
    for_each_vector<F>(numel, [&](int64_t j, int64_t count) {
      const Vector<F> values = load_wire<F>(source + j, count) / scale;
      store_first(target + j, count, values);
      of_lanes.add(values);
    });
    of_lanes.add_to(largest);
  }

  double receive_p(int64_t begin, int64_t end, F scale) const {
    return receive(elements<W>(wire.p_payload, begin), elements<F>(factors.p_payload, begin),
                   end - begin, scale);
  }

  double receive_q(F scale) const {
    return receive(elements<W>(wire.q_payload, 0), elements<F>(factors.q_payload, 0), wire.q_numel,
                   scale);
  }
};

// Calls function(payloads) if the wire rounds.
template <class Function>
inline void with_wire(const Bucket& wire, const Bucket& factors, const ParallelFor& parallel_for,
                      const Function& function) {
  with_storage(wire.wire_dtype, [&](auto storage) {
    using W = decltype(storage);
    if constexpr (!std::is_same_v<W, double>) {
      if (wire.factor_dtype == DType::kFloat64) {
        function(WirePayloads<double, W>{wire, factors, parallel_for});
      } else if constexpr (!std::is_same_v<W, float>) {
        function(WirePayloads<float, W>{wire, factors, parallel_for});
      }
    }
  });
}

template <class F>
POWERSGD_TILE_FUNCTION inline void examine(const F* values, int64_t numel, Largest& largest) {
  LargestOfLanes<F> of_lanes;
  for_each_vector<F>(
      numel, [&](int64_t j, int64_t count) { of_lanes.add(load_first(values + j, count)); });
  of_lanes.add_to(largest);
}

template <class F>
inline double largest_of_factors(const void* values, int64_t numel,
                                 const ParallelFor& parallel_for) {
  Largest largest;
  for_each_chunk(numel, parallel_for, [&](int64_t offset, int64_t chunk_numel) {
    examine(static_cast<const F*>(values) + offset, chunk_numel, largest);
  });
  return largest.get();
}

// Returns the largest magnitude of a payload that travels as factors.
inline double largest_of(const Bucket& bucket, const void* payload, int64_t numel,
                         const ParallelFor& parallel_for) {
  return bucket.factor_dtype == DType::kFloat64
             ? largest_of_factors<double>(payload, numel, parallel_for)
             : largest_of_factors<float>(payload, numel, parallel_for);
}

inline void project_to_wire(const Bucket& bucket, const ParallelFor& parallel_for) {
  const Bucket factors = in_factor_dtype(bucket);
  project(factors, parallel_for);
  WireScale& scale = bucket.state->p_scale;
  with_wire(bucket, factors, parallel_for, [&](const auto& payloads) {
    payloads.send_p(0, bucket.raw_offset, wire_scale(bucket, scale.next));
    payloads.send_raw(wire_scale(bucket, scale.next));
    payloads.send_p(bucket.counts_offset, bucket.p_numel, 1);
    scale.current = scale.next;
  });
}

inline void orthogonalize_from_wire(const Bucket& bucket, const ParallelFor& parallel_for) {
  const Bucket factors = in_factor_dtype(bucket);
  WireScale& scale = bucket.state->p_scale;
  double largest = 0;
  if (bucket.chooses_scales && !wire_rounds(bucket)) {
    largest = largest_of(bucket, bucket.p_payload, bucket.counts_offset, parallel_for);
  }
  with_wire(bucket, factors, parallel_for, [&](const auto& payloads) {
    largest = payloads.receive_p(0, bucket.counts_offset, wire_scale(bucket, scale.current));
    payloads.receive_p(bucket.counts_offset, bucket.p_numel, 1);
  });
  if (bucket.chooses_scales) scale.next = next_scale(largest, scale.next);
  if (std::isfinite(largest)) {
    orthogonalize(factors, parallel_for);
  } else {
    bucket.state->skipped = 1;
  }
}

inline void back_project_to_wire(const Bucket& bucket, const ParallelFor& parallel_for) {
  const Bucket factors = in_factor_dtype(bucket);
  WireScale& scale = bucket.state->q_scale;
  with_wire(bucket, factors, parallel_for, [&](const auto& payloads) {
    payloads.receive_p(bucket.counts_offset, bucket.p_numel, 1);
  });
  back_project(factors, parallel_for);
  with_wire(bucket, factors, parallel_for, [&](const auto& payloads) {
    payloads.send_q(wire_scale(bucket, scale.next));
    scale.current = scale.next;
  });
}

inline void reconstruct_from_wire(const Bucket& bucket, const ParallelFor& parallel_for) {
  const Bucket factors = in_factor_dtype(bucket);
  BucketState& state = *bucket.state;
  double largest = 0;
  if (bucket.chooses_scales && !wire_rounds(bucket)) {
    largest = largest_of(bucket, bucket.q_payload, bucket.q_numel, parallel_for);
  }
  with_wire(bucket, factors, parallel_for, [&](const auto& payloads) {
    payloads.receive_p(bucket.raw_offset, bucket.counts_offset,
                       wire_scale(bucket, state.p_scale.current));
    payloads.receive_p(bucket.counts_offset, bucket.p_numel, 1);
    largest = payloads.receive_q(wire_scale(bucket, state.q_scale.current));
  });
  if (bucket.chooses_scales) state.q_scale.next = next_scale(largest, state.q_scale.next);
  reconstruct(factors, parallel_for);
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
