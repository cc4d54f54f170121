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

// Whether `op` multiplies a model's float weights, which lie as in the file, with rows as `multiply_floats` takes them.
bool multiplies_floats(const Tensor& op);
// Called by all threads with the same operation.
void multiply_floats(const Functions& ggml, const Variant& variant, const Work& work, const Tensor& op);

}  // namespace edge::ggml
