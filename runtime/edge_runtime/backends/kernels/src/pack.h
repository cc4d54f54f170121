// Packs a matrix from the format of onnxruntime's MatMulNBits into tiles.
#pragma once
#include "layout.h"

namespace edge {

// Packs a matrix into one allocation, which begins at a cache line. `levels` [outputs, inputs * bits / 8] are little-endian, `scales` are
// [outputs, blocks]. Returns false without enough memory, or if no kernel supports the shape.
// With a `static_scale` of activations, all blocks of an output must have the same scale.
bool pack(PackedMatrix& out, int64_t outputs, int64_t inputs, int bits, int block, const uint8_t* levels, const float* scales, float static_scale = 0);
// The same with this thread's packed file (packed_file.h). If the file has a matrix of this name and kind, that is mapped, and neither levels nor
// scales are read. If the file is being written, the matrix is added to it.
bool pack_named(const char* name, PackedMatrix& out, int64_t outputs, int64_t inputs, int bits, int block, const uint8_t* levels, const float* scales, float static_scale = 0);
void release(PackedMatrix& matrix);
// Allocates memory for weights, which the caller frees with `free`; null if there is none. It begins at a cache line; if it is large, at a large
// page, so that fewer addresses have to be translated when all weights are read.
void* memory_for_weights(size_t size);
// Calls `part(data, first, last)` for pieces of the tiles of a matrix with `bytes` bytes, in several threads if it is large enough.
void for_all_tiles(int64_t tiles, size_t bytes, void (*part)(void*, int64_t, int64_t), void* data);
// Whether the kernels support such a matrix.
bool fits(int64_t outputs, int64_t inputs, int64_t bits, int64_t block);

}  // namespace edge
