// FLASH_ATTN_EXT by the kernels, in the threads of ggml's CPU backend: a row's numbers depend on nothing but what it attends to.
#pragma once
#include "facts.h"
#include "variants.h"

namespace edge::ggml {

// Whether `op` is attention of masked float32 rows to a memory of a type that `attend` takes.
bool attends(const Tensor& op);
// The bytes of work memory that `attend` needs for all threads together.
size_t attention_memory(const Tensor& op, int threads);
// Called by all threads with the same operation. Returns false, having done nothing, where memory does not suffice.
bool attend(const Functions& ggml, const Variant& variant, const Work& work, const Tensor& op);

}  // namespace edge::ggml
