// Products with float weights. Each file that includes this header compiles it for its own instruction set; the results are the same on all.
#pragma once
#include "layout.h"
#include "per_isa/floats16.h"

namespace edge {
namespace {

// Loads 16 weights as floats; the last ones may be beyond the end of the row.
template <FloatType kType>
struct FloatWeights;

template <>
struct FloatWeights<FloatType::kF32> {
    static constexpr int64_t size = 4;
    static Floats16 load(const char* from, int64_t count) {
        Floats16 value = 0;
        __builtin_memcpy(&value, from, static_cast<size_t>(count) * size);
        return value;
    }
};

template <>
struct FloatWeights<FloatType::kF16> {
    static constexpr int64_t size = 2;
    static Floats16 load(const char* from, int64_t count) {
        _Float16 __attribute__((ext_vector_type(kLanes))) value = 0;
        __builtin_memcpy(&value, from, static_cast<size_t>(count) * size);
        return __builtin_convertvector(value, Floats16);
    }
};

template <>
struct FloatWeights<FloatType::kBf16> {
    static constexpr int64_t size = 2;
    static Floats16 load(const char* from, int64_t count) {
        using Bits = uint32_t __attribute__((ext_vector_type(kLanes)));
        uint16_t __attribute__((ext_vector_type(kLanes))) value = 0;
        __builtin_memcpy(&value, from, static_cast<size_t>(count) * size);
        return __builtin_bit_cast(Floats16, __builtin_convertvector(value, Bits) << 16);
    }
};

template <FloatType kType, int kOutputs, int kRows>
void multiply_block(const FloatProduct& p, int64_t output, int64_t row) {
    using Weights = FloatWeights<kType>;
    const char *weights = p.weights + static_cast<size_t>(output) * p.weight_bytes, *values = p.values + static_cast<size_t>(row) * p.value_bytes;
    Floats16 sum[kOutputs][kRows];
    for (auto& of_output : sum)
        for (auto& of_row : of_output) of_row = 0;
    const auto add = [&](int64_t i, int64_t count) {
        Floats16 x[kRows];
        for (int r = 0; r < kRows; r++) {
            const float* from = reinterpret_cast<const float*>(values + static_cast<size_t>(r) * p.value_bytes) + i;
            x[r] = count == kLanes ? load16(from) : load16(from, count);
        }
        for (int n = 0; n < kOutputs; n++) {
            const Floats16 w = Weights::load(weights + static_cast<size_t>(n) * p.weight_bytes + i * Weights::size, count);
            for (int r = 0; r < kRows; r++) sum[n][r] = __builtin_elementwise_fma(w, x[r], sum[n][r]);
        }
    };
    int64_t i = 0;
    for (; i + kLanes <= p.inputs; i += kLanes) add(i, kLanes);
    if (i < p.inputs) add(i, p.inputs - i);
    for (int n = 0; n < kOutputs; n++)
        for (int r = 0; r < kRows; r++) {
            float total = 0;
            for (int lane = 0; lane < kLanes; lane++) total += sum[n][r][lane];
            p.out[(row + r) * p.stride + output + n] = total;
        }
}

// Computes kOutputs outputs of the rows [row, end).
template <FloatType kType, int kOutputs>
void multiply_rows_of(const FloatProduct& p, int64_t output, int64_t row, int64_t end) {
    for (; row + 4 <= end; row += 4) multiply_block<kType, kOutputs, 4>(p, output, row);
    for (; row + 2 <= end; row += 2) multiply_block<kType, kOutputs, 2>(p, output, row);
    if (row < end) multiply_block<kType, kOutputs, 1>(p, output, row);
}

// Computes kOutputs outputs at a time, so that all sums fit into registers.
template <int kOutputs>
struct FloatKernels {
    static constexpr int64_t kRowsAtOnce = 16;  // rows that stay in the cache while outputs are computed

    template <FloatType kType>
    static void multiply_type(const FloatProduct& p, int64_t first, int64_t last) {
        for (int64_t row = 0; row < p.rows; row += kRowsAtOnce) {
            const int64_t end = row + kRowsAtOnce < p.rows ? row + kRowsAtOnce : p.rows;
            int64_t output = first;
            for (; output + kOutputs <= last; output += kOutputs) multiply_rows_of<kType, kOutputs>(p, output, row, end);
            for (; output < last; output++) multiply_rows_of<kType, 1>(p, output, row, end);
        }
    }
    static void multiply(const FloatProduct& p, int64_t first, int64_t last) {
        switch (p.type) {
            case FloatType::kF32: return multiply_type<FloatType::kF32>(p, first, last);
            case FloatType::kF16: return multiply_type<FloatType::kF16>(p, first, last);
            case FloatType::kBf16: return multiply_type<FloatType::kBf16>(p, first, last);
        }
    }
};

}  // namespace
}  // namespace edge
