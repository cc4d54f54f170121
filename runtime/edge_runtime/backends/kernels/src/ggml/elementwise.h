// GLU with GELU, and TANH, by the kernels. Stock ones cut rows, not values, so that one row has one thread (TANH has one in any case), and call
// the C library for each value; all threads share every row here.
#pragma once
#include "facts.h"
#include "variants.h"

namespace edge::ggml {

// Whether `op` is one of the two, on float32 rows that lie one behind the other in themselves.
bool is_elementwise(const Tensor& op);
// Called by all threads with the same operation.
void compute_elementwise(const Variant& variant, const Work& work, const Tensor& op);

}  // namespace edge::ggml
