// Packs a matrix as onnxruntime's MatMulNBits stores it into tiles.
#pragma once
#include "layout.h"

namespace edge {

// What packing makes: one allocation, aligned to lines. `levels` [outputs, inputs * bits / 8] little end first, `scales` [outputs, blocks].
// Returns false where there is no memory for it, or for a shape that no kernel takes.
// With a `static_scale` of activations all blocks of an output must have the same scale.
bool pack(PackedMatrix& out, int64_t outputs, int64_t inputs, int bits, int block, const uint8_t* levels, const float* scales, float static_scale = 0);
// The same by way of this thread's packed file (packed_file.h). If that has a matrix of this name and kind, neither levels nor scales are read;
// if it is being written, the matrix is added to it.
bool pack_named(const char* name, PackedMatrix& out, int64_t outputs, int64_t inputs, int bits, int block, const uint8_t* levels, const float* scales, float static_scale = 0);
void release(PackedMatrix& matrix);
// Memory for weights, to be freed by `free`; null where there is none. It begins at a line, and large pieces at a large page: weights are
// read from end to end, so that fewer addresses have to be translated.
void* memory_for_weights(size_t size);
// Calls `part(data, first, last)` for pieces of the tiles of a matrix of `bytes`, on several processors where that is worth their start.
void for_all_tiles(int64_t tiles, size_t bytes, void (*part)(void*, int64_t, int64_t), void* data);
// Whether kernels take such a matrix.
bool fits(int64_t outputs, int64_t inputs, int64_t bits, int64_t block);

}  // namespace edge
