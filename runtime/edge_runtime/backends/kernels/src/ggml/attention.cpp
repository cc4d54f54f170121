#include "attention.h"

#include <string.h>

#include "cells.h"

namespace edge::ggml {
namespace {

constexpr int64_t kMaxDim = 4096, kMaxCells = int64_t{1} << 26, kMaxBatchRows = int64_t{1} << 20;

float parameter(const Tensor& op, int number) {
    float value;
    memcpy(&value, op.op_params + number, sizeof value);
    return value;
}

CellType type_of(const Tensor& t) { return t.type == kF16 ? CellType::kHalf : t.type == kQ8_0 ? CellType::kQ8 : CellType::kQ4; }

bool is_memory(const Tensor& t) {
    const bool known = t.type == kF16 || t.type == kQ8_0 || t.type == kQ4_0;
    return known && t.nb[0] == bytes_of_block(type_of(t)) && t.ne[0] % values_of_block(type_of(t)) == 0;
}

const char* at(const Tensor& t, int64_t second, int64_t third, int64_t fourth) {
    return static_cast<const char*>(t.data) + static_cast<size_t>(second) * t.nb[1] + static_cast<size_t>(third) * t.nb[2] +
           static_cast<size_t>(fourth) * t.nb[3];
}

// Queries of one K/V head: `group` heads of each of `rows` rows, cut into pieces of about the same size for the threads.
struct Pieces {
    int64_t rows, group, heads, streams, each, of_head;

    Pieces(const Tensor& op, int threads) {
        const Tensor &queries = *op.src[0], &keys = *op.src[1];
        rows = queries.ne[1], heads = keys.ne[2], streams = keys.ne[3], group = queries.ne[2] / heads;
        const int64_t all = rows * group;
        of_head = (all + kMaxQueries - 1) / kMaxQueries;
        if (heads * streams % threads) of_head = whole(of_head, threads);
        each = (all + of_head - 1) / of_head;
        of_head = (all + each - 1) / each;
    }
    int64_t count() const { return of_head * heads * streams; }
};

Cells cells_of(const Tensor& t, int64_t head, int64_t stream) { return {type_of(t), at(t, 0, head, stream), t.nb[1], t.ne[0]}; }

const uint16_t* mask_of(const Tensor& mask, int64_t row, int64_t head, int64_t stream) {
    return reinterpret_cast<const uint16_t*>(at(mask, row, head % mask.ne[2], stream % mask.ne[3]));
}

// Whether two rows attend to a cell in common; those of different sequences do not.
bool overlap(const uint16_t* one, const uint16_t* other, int64_t cells) {
    constexpr uint16_t kLeftOut = 0xfc00;
    constexpr int64_t kStep = 64;
    for (int64_t first = 0; first < cells; first += kStep) {
        const int64_t last = cells - first < kStep ? cells : first + kStep;
        bool any = false;
        for (int64_t cell = first; cell < last; cell++) any |= (one[cell] != kLeftOut) & (other[cell] != kLeftOut);
        if (any) return true;
    }
    return false;
}

void attend_piece(const Variant& variant, const Tensor& op, const Pieces& pieces, int64_t number, void* memory) {
    const Tensor &queries = *op.src[0], &keys = *op.src[1], &values = *op.src[2], &masks = *op.src[3];
    const int64_t head = number / pieces.of_head % pieces.heads, stream = number / pieces.of_head / pieces.heads;
    const int64_t first = number % pieces.of_head * pieces.each, all = pieces.rows * pieces.group;
    CellAttention a = {cells_of(keys, head, stream), cells_of(values, head, stream), keys.ne[1], parameter(op, 0), 0, {}, {}, {}};
    for (int64_t query = first; query < first + pieces.each && query < all; query++) {
        const int64_t row = query / pieces.group, of_query = head * pieces.group + query % pieces.group;
        const uint16_t* mask = mask_of(masks, row, of_query, stream);
        if (a.queries && mask != a.mask[a.queries - 1] && !overlap(mask, a.mask[a.queries - 1], a.cells)) {
            variant.attend_cells(a, memory);
            a.queries = 0;
        }
        a.query[a.queries] = reinterpret_cast<const float*>(at(queries, row, of_query, stream));
        a.mask[a.queries] = mask;
        a.out[a.queries++] = reinterpret_cast<float*>(static_cast<char*>(op.data) + static_cast<size_t>(stream) * op.nb[3] +
                                                      static_cast<size_t>(row) * op.nb[2] + static_cast<size_t>(of_query) * op.nb[1]);
    }
    if (a.queries) variant.attend_cells(a, memory);
}

size_t memory_of_thread(const Tensor& op) { return CellMemory(op.src[1]->ne[1], op.src[1]->ne[0], op.src[2]->ne[0], nullptr).bytes; }

}  // namespace

bool attends(const Tensor& op) {
    if (op.op != kFlashAttention || op.type != kF32 || op.src[4] || parameter(op, 1) != 0 || parameter(op, 2) != 0) return false;
    for (int i = 0; i < 4; i++)
        if (!op.src[i]) return false;
    const Tensor &q = *op.src[0], &k = *op.src[1], &v = *op.src[2], &mask = *op.src[3];
    const bool types = q.type == kF32 && q.nb[0] == 4 && op.nb[0] == 4 && is_memory(k) && is_memory(v) && mask.type == kF16 && mask.nb[0] == 2;
    const bool limits = q.ne[1] >= 1 && q.ne[1] <= kMaxBatchRows && k.ne[0] >= 1 && k.ne[0] <= kMaxDim && v.ne[0] >= 1 && v.ne[0] <= kMaxDim &&
                        k.ne[1] >= 1 && k.ne[1] <= kMaxCells && k.ne[2] >= 1 && k.ne[3] >= 1 && mask.ne[2] >= 1 && mask.ne[3] >= 1;
    return types && limits && q.ne[0] == k.ne[0] && v.ne[1] == k.ne[1] && v.ne[2] == k.ne[2] && v.ne[3] == k.ne[3] && q.ne[3] == k.ne[3] &&
           q.ne[2] >= k.ne[2] && q.ne[2] % k.ne[2] == 0 && mask.ne[0] >= k.ne[1] && mask.ne[1] >= q.ne[1] && op.ne[0] == v.ne[0] &&
           op.ne[1] == q.ne[2] && op.ne[2] == q.ne[1] && op.ne[3] == q.ne[3];
}

size_t attention_memory(const Tensor& op, int threads) { return memory_of_thread(op) * static_cast<size_t>(threads) + kLine; }

bool attend(const Functions& ggml, const Variant& variant, const Work& work, const Tensor& op) {
    if (work.size < attention_memory(op, work.threads)) return false;
    const uintptr_t start = (reinterpret_cast<uintptr_t>(work.memory) + kLine - 1) / kLine * kLine;
    void* memory = reinterpret_cast<void*>(start + memory_of_thread(op) * static_cast<size_t>(work.thread));
    const Pieces pieces(op, work.threads);
    const bool shared = pieces.count() > work.threads;  // otherwise a thread has one piece or none, and waits for nobody
    if (shared) {
        if (work.thread == 0) ggml.set_chunk(work.pool, work.threads);
        ggml.barrier(work.pool);
    }
    for (int64_t piece = work.thread; piece < pieces.count(); piece = shared ? ggml.add_chunk(work.pool, 1) : pieces.count())
        attend_piece(variant, op, pieces, piece, memory);
    return true;
}

}  // namespace edge::ggml
