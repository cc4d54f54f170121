// Reads rows of keys and values, in the types in which they are stored, as floats. Each file that includes this header compiles it for its own
// instruction set.
#pragma once
#include "draft/steps.h"
#include "per_isa/register_blocks.h"

namespace edge {
namespace {

using Halves16 = _Float16 __attribute__((ext_vector_type(16)));

template <class Vector, class From>
[[gnu::always_inline]] inline Vector load_as(const From* from) {
    Vector value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

inline float half_at(const char* from) {
    _Float16 value;
    __builtin_memcpy(&value, from, sizeof value);
    return static_cast<float>(value);
}

// Loads kCount values of a row from `at` on; `at` is a multiple of kCount, and kCount divides 16.
template <RowType kType, int kCount>
[[gnu::always_inline]] inline auto load_values(const char* row, int64_t at) {
    using Values = float __attribute__((ext_vector_type(kCount)));
    using Halves = _Float16 __attribute__((ext_vector_type(kCount)));
    using Bytes = int8_t __attribute__((ext_vector_type(kCount)));
    using Raw = uint8_t __attribute__((ext_vector_type(kCount)));
    if constexpr (kType == RowType::kFloat) return load_as<Values>(row + at * 4);
    else if constexpr (kType == RowType::kHalf) return __builtin_convertvector(load_as<Halves>(row + at * 2), Values);
    else if constexpr (kType == RowType::kInt8) return __builtin_convertvector(load_as<Bytes>(row + at), Values);
    else {
        const char* block = row + at / 32 * bytes_of_unit(kType);
        const float scale = half_at(block);
        if constexpr (kType == RowType::kQ8) return __builtin_convertvector(load_as<Bytes>(block + 2 + at % 32), Values) * scale;
        else {
            const Raw raw = load_as<Raw>(block + 2 + at % 16);
            return (__builtin_convertvector(at % 32 < 16 ? raw & 15 : raw >> 4, Values) - 8.0f) * scale;
        }
    }
}

// Loads 16 values of a row of `dim` values; those beyond its end are 0.
template <RowType kType>
[[gnu::always_inline]] inline Floats16 load_values(const char* row, int64_t at, int64_t dim) {
    if (at + kLanes <= dim) return load_values<kType, kLanes>(row, at);
    if constexpr (kType == RowType::kHalf) {
        Halves16 last = 0;
        if (at < dim) __builtin_memcpy(&last, row + at * 2, static_cast<size_t>(dim - at) * 2);
        return __builtin_convertvector(last, Floats16);
    }
    return 0;  // not reached: rows of other types consist of whole blocks
}

}  // namespace
}  // namespace edge
