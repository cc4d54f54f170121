// MUL_MAT with the kernels, in the threads of ggml's CPU backend, for packed weights and for float weights.
#pragma once
#include "variants.h"
#include "facts.h"

namespace edge::ggml {

// Gives a thread pieces of work, one after the other. The first piece of each thread is fixed.
struct Pieces {
    const Functions& ggml;
    const Work& work;
    int64_t count, current;
    Pieces(const Functions& functions, const Work& of, int64_t pieces) : ggml(functions), work(of), count(pieces), current(of.thread) {}
    bool left() const { return current < count; }
    void next() { current = ggml.add_chunk(work.pool, 1); }
};
// Returns how many of `count` parts make a piece, at least `least`. There are several pieces per thread, so that a slow thread gets fewer.
int64_t parts_of_piece(const Work& work, int64_t count, int64_t least);
// Rounds this thread's share of rows of floats, from row `first` on.
void round_part(const Variant& variant, const Work& work, const Tensor& values, int64_t first, const PackedMatrix& m, const RoundedRows& to);

// Whether `multiply` can compute `op`, with packed weights.
bool multiplies(const Tensor& op);
// The bytes of work memory that `multiply` needs for all threads together.
size_t multiply_memory(const Tensor& op);
// Must be called by all threads with the same operation. If work memory is too small, it does nothing and returns false.
bool multiply(const Functions& ggml, const Variant& variant, const Work& work, const Tensor& op);

// Whether `multiply_floats` can compute `op`, with a model's float weights in the layout of the file.
bool multiplies_floats(const Tensor& op);
// Must be called by all threads with the same operation.
void multiply_floats(const Functions& ggml, const Variant& variant, const Work& work, const Tensor& op);

}  // namespace edge::ggml
