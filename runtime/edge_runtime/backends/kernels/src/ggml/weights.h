// Weights of GGUF files in the kernels' layout: what they need in memory, and packing them.
#pragma once
#include "layout.h"
#include "facts.h"

namespace edge::ggml {

constexpr size_t kAlignment = 64;

// Whether weights of this type and shape can be packed. Float weights cannot: they are multiplied where they lie.
bool packs(const Tensor& weights);
// The bytes that they need.
size_t packed_bytes(const Tensor& weights);
// Packs weights of that type and shape from `data`, as a GGUF file has them, into `memory`.
void pack_weights(const Tensor& weights, const void* data, void* memory);
// Packed weights as the kernels take them.
PackedMatrix packed_matrix(const Tensor& weights);

}  // namespace edge::ggml
