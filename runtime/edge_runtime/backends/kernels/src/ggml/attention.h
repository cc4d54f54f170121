// FLASH_ATTN_EXT with the kernels, in the threads of ggml's CPU backend. The result of a row depends only on the rows that it attends to.
#pragma once
#include "facts.h"
#include "variants.h"

namespace edge::ggml {

// Whether `attend` can compute `op`: attention of masked float32 rows to a KV cache of a supported type.
bool attends(const Tensor& op);
// The bytes of work memory that `attend` needs for all threads together.
size_t attention_memory(const Tensor& op, int threads);
// Must be called by all threads with the same operation. If work memory is too small, it does nothing and returns false.
bool attend(const Functions& ggml, const Variant& variant, const Work& work, const Tensor& op);

}  // namespace edge::ggml
