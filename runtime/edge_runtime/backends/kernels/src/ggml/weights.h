// Packs weights of GGUF files into the kernels' layout.
#pragma once
#include "layout.h"
#include "facts.h"

namespace edge::ggml {

constexpr size_t kAlignment = 64;

// Whether weights of this type and shape can be packed. Float weights are not packed, but used in the layout of the file.
bool packs(const Tensor& weights);
// The bytes of packed weights of this type and shape.
size_t packed_bytes(const Tensor& weights);
// Packs weights of this type and shape from `data`, in the format of GGUF files, into `memory`.
void pack_weights(const Tensor& weights, const void* data, void* memory);
// Describes packed weights for the kernels.
PackedMatrix packed_matrix(const Tensor& weights);

}  // namespace edge::ggml
