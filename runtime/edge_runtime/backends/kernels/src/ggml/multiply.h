// MUL_MAT by the kernels, in the threads of ggml's CPU backend, and float weights row by row.
#pragma once
#include "variants.h"
#include "facts.h"

namespace edge::ggml {

// The next piece of work, each with its own first one.
struct Pieces {
    const Functions& ggml;
    const Work& work;
    int64_t count, current;
    Pieces(const Functions& functions, const Work& of, int64_t pieces) : ggml(functions), work(of), count(pieces), current(of.thread) {}
    bool left() const { return current < count; }
    void next() { current = ggml.add_chunk(work.pool, 1); }
};
// How many of `count` parts make a piece of at least `least`: several pieces for each thread, so that a slow one gets fewer.
int64_t parts_of_piece(const Work& work, int64_t count, int64_t least);
// This thread's part of rounding rows of floats from row `first` on.
void round_part(const Variant& variant, const Work& work, const Tensor& values, int64_t first, const PackedMatrix& m, const RoundedRows& to);

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
