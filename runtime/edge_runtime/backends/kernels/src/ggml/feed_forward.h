// A gated feed-forward without floats between its products: GELU's operation multiplies with both matrices itself, some outputs at a time, and
// writes rounded inputs of the product behind it into its own memory.
//
// ggml plans a graph's nodes in order: two products with the same rows, the operation that reads both, the product that reads that. Each gets a
// mark, made anew at every plan. Any other reader, or a graph that ends in between because somebody asked for a node, takes it back: then the
// node is computed as floats. A program that reads a node's memory has to ask for it, and so makes it the last one of a graph.
#pragma once
#include "read_rows.h"
#include "variants.h"

namespace edge::ggml {

// Called for each node in the order of a plan, with up to two nodes planned before it, the nearer one first; `ours` is a product by the kernels.
void plan_feed_forward(Tensor& node, bool ours, Tensor* before, Tensor* earlier);
// Whether a product is computed by the operation that reads it; whether an operation computes its two products; and whether it rounds.
bool is_left_out(const Tensor& product);
bool joins_products(const Tensor& op);
bool is_rounded(const Tensor& op);
// The bytes of work memory that `compute_gates` needs for all threads together.
size_t gates_memory(const Tensor& op);
// Computes an operation that joins its products; `read`: only these rows. Returns false, having done nothing, where memory does not suffice.
bool compute_gates(const Functions& ggml, const Variant& variant, const Work& work, const Tensor& op, const ReadRows* read);

}  // namespace edge::ggml
