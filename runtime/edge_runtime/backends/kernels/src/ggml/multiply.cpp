#include "multiply.h"

#include "feed_forward.h"
#include "weights.h"

namespace edge::ggml {
namespace {

constexpr int64_t kChunk = 4 * kTile;  // outputs of a piece with float weights
constexpr int64_t kShares = 16;  // pieces per thread
constexpr int64_t kMaxBatchRows = int64_t{1} << 20;

int64_t rows_of(const Tensor& op) { return op.src[1]->ne[1]; }

// Whether `op` multiplies two matrices, of which the second and the result are rows of floats.
bool is_product_of_rows(const Tensor& op) {
    if (op.op != kMulMat || !op.src[0] || !op.src[1]) return false;
    const Tensor &weights = *op.src[0], &values = *op.src[1];
    return values.type == kF32 && values.ne[0] == weights.ne[0] && values.ne[1] <= kMaxBatchRows && values.ne[2] == 1 && values.ne[3] == 1 &&
           values.nb[0] == 4 && values.nb[1] % 4 == 0 && op.type == kF32 && op.ne[0] == weights.ne[1] && op.ne[1] == values.ne[1] && op.nb[0] == 4 &&
           op.nb[1] == static_cast<size_t>(weights.ne[1]) * 4;
}

size_t float_bytes(int type) { return type == kF32 ? 4 : type == kF16 || type == kBf16 ? 2 : 0; }

}  // namespace

int64_t parts_of_piece(const Work& work, int64_t count, int64_t least) {
    const int64_t share = count / (work.threads * kShares);
    return share < least ? least : share / least * least;
}

void round_part(const Variant& variant, const Work& work, const Tensor& values, int64_t first, const PackedMatrix& m, const RoundedRows& to) {
    const int64_t begin = m.blocks() * work.thread / work.threads, end = m.blocks() * (work.thread + 1) / work.threads;
    variant.round_rows(m, begin, end, to, [&](int64_t row) {
        return reinterpret_cast<const float*>(static_cast<const char*>(values.data) + static_cast<size_t>(first + row) * values.nb[1]);
    });
}

bool multiplies(const Tensor& op) { return is_product_of_rows(op) && packs(*op.src[0]); }

size_t multiply_memory(const Tensor& op) {
    return RoundedRows::bytes(packed_matrix(*op.src[0]), rows_of(op)) + kAlignment;
}

bool multiply(const Functions& ggml, const Variant& variant, const Work& work, const Tensor& op) {
    if (work.size < multiply_memory(op)) return false;
    const PackedMatrix m = packed_matrix(*op.src[0]);
    const uintptr_t start = (reinterpret_cast<uintptr_t>(work.memory) + kAlignment - 1) / kAlignment * kAlignment;
    const bool rounded = is_rounded(*op.src[1]);
    const RoundedRows rows(m, rows_of(op), rounded ? op.src[1]->data : reinterpret_cast<void*>(start));
    if (!rounded) round_part(variant, work, *op.src[1], 0, m, rows);
    if (work.thread == 0) ggml.set_chunk(work.pool, work.threads);
    ggml.barrier(work.pool);
    const int64_t tiles = m.tiles(), step = parts_of_piece(work, tiles, kTilesAtOnce / 2);
    for (Pieces pieces(ggml, work, (tiles + step - 1) / step); pieces.left(); pieces.next()) {
        const int64_t first = pieces.current * step, last = first + step < tiles ? first + step : tiles;
        variant.multiply(m, rows, first, last, {m, static_cast<float*>(op.data)});
    }
    return true;
}

bool multiplies_floats(const Tensor& op) {
    if (!is_product_of_rows(op)) return false;
    const Tensor& w = *op.src[0];
    const size_t size = float_bytes(w.type);
    return size && w.ne[0] > 0 && w.ne[1] > 0 && w.ne[2] == 1 && w.ne[3] == 1 && w.nb[0] == size && w.nb[1] >= static_cast<size_t>(w.ne[0]) * size &&
           w.buffer && w.buffer->usage == kWeights && !w.view_src;
}

void multiply_floats(const Functions& ggml, const Variant& variant, const Work& work, const Tensor& op) {
    const Tensor &weights = *op.src[0], &values = *op.src[1];
    const FloatType type = weights.type == kF32 ? FloatType::kF32 : weights.type == kF16 ? FloatType::kF16 : FloatType::kBf16;
    const FloatProduct product = {type,      static_cast<const char*>(weights.data), weights.nb[1], weights.ne[0], static_cast<const char*>(values.data),
                                  values.nb[1], rows_of(op),                            static_cast<float*>(op.data), weights.ne[1]};
    if (work.thread == 0) ggml.set_chunk(work.pool, work.threads);
    ggml.barrier(work.pool);
    const int64_t outputs = weights.ne[1], step = kChunk;
    for (Pieces pieces(ggml, work, (outputs + step - 1) / step); pieces.left(); pieces.next()) {
        const int64_t first = pieces.current * step, last = first + step < outputs ? first + step : outputs;
        variant.multiply_floats(product, first, last);
    }
}

}  // namespace edge::ggml
