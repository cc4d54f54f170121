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

Cells cells_of(const Tensor& t, int64_t head, int64_t stream) { return {type_of(t), at(t, 0, head, stream), t.nb[1], t.ne[0]}; }

const uint16_t* mask_of(const Tensor& mask, int64_t row, int64_t head, int64_t stream) {
    return reinterpret_cast<const uint16_t*>(at(mask, row, head % mask.ne[2], stream % mask.ne[3]));
}

// Whether two rows attend to a common cell. Rows of different sequences do not.
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

// The queries of one K/V head: `group` heads of each row.
struct Queries {
    int64_t rows, group, all, most;  // at most `most` queries are computed at once

    explicit Queries(const Tensor& op) : rows(op.src[0]->ne[1]), group(op.src[0]->ne[2] / op.src[1]->ne[2]), all(rows * group) {
        const int64_t calls = (all + kMaxQueries - 1) / kMaxQueries;
        most = (all + calls - 1) / calls;
    }
};

void attend_head(const Variant& variant, const Tensor& op, int64_t head, int64_t stream, const CellMemory& memory, const Team& team) {
    const Tensor &queries = *op.src[0], &keys = *op.src[1], &values = *op.src[2], &masks = *op.src[3];
    const Queries count(op);
    CellAttention a = {cells_of(keys, head, stream), cells_of(values, head, stream), keys.ne[1], parameter(op, 0), 0, {}, {}, {}};
    const auto run = [&] {
        if (a.queries) variant.attend_cells(a, memory, team);
        a.queries = 0;
    };
    for (int64_t query = 0; query < count.all; query++) {
        const int64_t row = query / count.group, of_query = head * count.group + query % count.group;
        const uint16_t* mask = mask_of(masks, row, of_query, stream);
        if (a.queries == count.most || (a.queries && mask != a.mask[a.queries - 1] && !overlap(mask, a.mask[a.queries - 1], a.cells))) run();
        a.query[a.queries] = reinterpret_cast<const float*>(at(queries, row, of_query, stream));
        a.mask[a.queries] = mask;
        a.out[a.queries++] = reinterpret_cast<float*>(static_cast<char*>(op.data) + static_cast<size_t>(stream) * op.nb[3] +
                                                      static_cast<size_t>(row) * op.nb[2] + static_cast<size_t>(of_query) * op.nb[1]);
    }
    run();
}

CellMemory memory_of(const Tensor& op, void* memory) {
    return CellMemory(op.src[1]->ne[1], op.src[1]->ne[0], op.src[2]->ne[0], Queries(op).most, memory);
}

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

size_t attention_memory(const Tensor& op, int threads) { return memory_of(op, nullptr).size(threads) + kLine; }

bool attend(const Functions& ggml, const Variant& variant, const Work& work, const Tensor& op) {
    if (work.size < attention_memory(op, work.threads)) return false;
    const uintptr_t start = (reinterpret_cast<uintptr_t>(work.memory) + kLine - 1) / kLine * kLine;
    const CellMemory memory = memory_of(op, reinterpret_cast<void*>(start));
    struct Pool {
        void (*barrier)(Threadpool*);
        Threadpool* pool;
    } pool = {ggml.barrier, work.pool};
    const auto wait = [](void* data) {
        const Pool& all = *static_cast<Pool*>(data);
        all.barrier(all.pool);
    };
    const Team team = {work.thread, work.threads, wait, &pool};
    for (int64_t stream = 0; stream < op.src[1]->ne[3]; stream++)
        for (int64_t head = 0; head < op.src[1]->ne[2]; head++) attend_head(variant, op, head, stream, memory, team);
    return true;
}

}  // namespace edge::ggml
