// MUL_MAT by the kernels, in the threads of ggml's CPU backend, and float weights row by row.
#pragma once
#include "variants.h"
#include "facts.h"

namespace edge::ggml {

// Whether `op` multiplies packed weights with rows as `multiply` takes them.
bool multiplies(const Tensor& op);
// The bytes of work memory that `multiply` needs for all threads together.
size_t multiply_memory(const Tensor& op);
// Called by all threads with the same operation. Returns false, having done nothing, where memory does not suffice.
bool multiply(const Functions& ggml, const Variant& variant, const Work& work, const Tensor& op);

// out[row * stride + output] for the outputs [first, last): every sum runs over 16 lanes in one order.
void multiply_bf16(const uint16_t* weights, int64_t inputs, int64_t first, int64_t last, const char* values, size_t row_bytes, int64_t rows,
                   float* out, int64_t stride);

}  // namespace edge::ggml
