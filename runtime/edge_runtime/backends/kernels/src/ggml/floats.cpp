// Weights in bfloat16. Compiled for the weakest processor that has a variant of the kernels; lanes and their order are the same on all.
#include "multiply.h"

namespace edge::ggml {
namespace {

constexpr int kLanes = 16, kRows = 4;
using Floats = float __attribute__((ext_vector_type(kLanes)));
using Bits = uint32_t __attribute__((ext_vector_type(kLanes)));
using Halves = uint16_t __attribute__((ext_vector_type(kLanes)));

template <class Vector>
Vector load(const void* from) {
    Vector value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

template <int rows>
void multiply_rows(const uint16_t* weights, int64_t inputs, int64_t first, int64_t last, const char* values, size_t row_bytes, float* out, int64_t stride) {
    for (int64_t output = first; output < last; output++) {
        const uint16_t* w = weights + output * inputs;
        Floats sum[rows];
        for (int r = 0; r < rows; r++) sum[r] = 0;
        for (int64_t i = 0; i < inputs; i += kLanes) {
            const Bits bits = __builtin_convertvector(load<Halves>(w + i), Bits) << 16;
            for (int r = 0; r < rows; r++)
                sum[r] = __builtin_elementwise_fma(__builtin_bit_cast(Floats, bits), load<Floats>(values + r * row_bytes + i * 4), sum[r]);
        }
        for (int r = 0; r < rows; r++) {
            float total = 0;
            for (int lane = 0; lane < kLanes; lane++) total += sum[r][lane];
            out[r * stride + output] = total;
        }
    }
}

}  // namespace

void multiply_bf16(const uint16_t* weights, int64_t inputs, int64_t first, int64_t last, const char* values, size_t row_bytes, int64_t rows, float* out,
                   int64_t stride) {
    int64_t row = 0;
    for (; row + kRows <= rows; row += kRows)
        multiply_rows<kRows>(weights, inputs, first, last, values + row * row_bytes, row_bytes, out + row * stride, stride);
    for (; row < rows; row++) multiply_rows<1>(weights, inputs, first, last, values + row * row_bytes, row_bytes, out + row * stride, stride);
}

}  // namespace edge::ggml
