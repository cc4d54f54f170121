// A gated feed-forward without floats between its products. The GELU operation multiplies with both matrices itself, a few outputs at a time, and
// writes rounded inputs for the next product into the memory of its result.
//
// ggml plans the nodes of a graph in order: two products with the same rows, the operation that reads both, and the product that reads that. Each of
// them gets a mark, which is set anew at every plan. The mark is removed if there is any other reader, or if the graph ends in between because a
// program asked for a node; then the node is computed as floats. A program cannot read the memory of a node without asking for it, which makes
// it the last node of a graph.
#pragma once
#include "read_rows.h"
#include "variants.h"

namespace edge::ggml {

// Must be called for each node in the order of a plan, with the node planned before it and the one before that (or null). `ours`: the node is a
// product that the kernels compute.
void plan_feed_forward(Tensor& node, bool ours, Tensor* before, Tensor* earlier);
// Whether a product is left to the operation that reads it; whether an operation computes its two products; and whether it rounds its result.
bool is_left_out(const Tensor& product);
bool joins_products(const Tensor& op);
bool is_rounded(const Tensor& op);
// The bytes of work memory that `compute_gates` needs for all threads together.
size_t gates_memory(const Tensor& op);
// Computes an operation together with its products, only the rows in `read` unless that is null. If work memory is too small, it does nothing and
// returns false.
bool compute_gates(const Functions& ggml, const Variant& variant, const Work& work, const Tensor& op, const ReadRows* read);

}  // namespace edge::ggml
