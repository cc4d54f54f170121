// GLU with GELU, and TANH, with the kernels, where all threads share every row. ggml's own operations give each row to one thread (TANH always uses
// a single thread), and call the C library for each value.
#pragma once
#include "facts.h"
#include "variants.h"

namespace edge::ggml {

// Whether `op` is one of the two, on float32 rows that are contiguous.
bool is_elementwise(const Tensor& op);
// Must be called by all threads with the same operation.
void compute_elementwise(const Variant& variant, const Work& work, const Tensor& op);

}  // namespace edge::ggml
