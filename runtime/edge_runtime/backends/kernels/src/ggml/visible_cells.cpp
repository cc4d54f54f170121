#include "visible_cells.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cells.h"
#include "export.h"

namespace edge::ggml {

constexpr int kWatchedLayers = 2;
constexpr uint16_t kHidden = 0xfc00;  // minus infinity, float16

// The inputs of a layer's attention in the newest forward. `masks` [rows, cells] are those of the flagged rows, in order.
struct WatchedLayer {
    int64_t number;
    DraftSource source;  // without cells, count and rotations
    int64_t dim, cells, rows;
    uint16_t* masks;
    size_t room;
};

// Layers are told apart by counting: each has one attention operation.
struct CellWatch {
    WatchedLayer layers[kWatchedLayers];
    const Tensor* newest;
    int64_t attended;
    const int8_t* flags;  // of the forward's rows
    int64_t count;
};

namespace {

pthread_key_t key;

int64_t row_type(int type) {
    return static_cast<int64_t>(type == kF16 ? RowType::kHalf : type == kQ8_0 ? RowType::kQ8 : RowType::kQ4);
}

// Records the layer's K/V rows, and allocates memory for the masks of `rows` rows. Returns false without enough memory.
bool begin_layer(WatchedLayer& layer, const Tensor& op, int64_t rows) {
    const Tensor &keys = *op.src[1], &values = *op.src[2];
    const size_t bytes = static_cast<size_t>(rows * keys.ne[1]) * 2;
    if (bytes > layer.room) {
        free(layer.masks);
        layer.masks = static_cast<uint16_t*>(malloc(bytes));
        layer.room = layer.masks ? bytes : 0;
        if (!layer.masks) return false;
    }
    layer.cells = keys.ne[1], layer.dim = keys.ne[0];
    layer.source.type = row_type(keys.type), layer.source.kv_heads = keys.ne[2];
    layer.source.keys = static_cast<const char*>(keys.data), layer.source.values = static_cast<const char*>(values.data);
    layer.source.key_step = static_cast<int64_t>(keys.nb[1]), layer.source.value_step = static_cast<int64_t>(values.nb[1]);
    layer.source.key_head = static_cast<int64_t>(keys.nb[2]), layer.source.value_head = static_cast<int64_t>(values.nb[2]);
    return true;
}

}  // namespace

bool prepare_watches() { return pthread_key_create(&key, nullptr) == 0; }

void watch_attention(const Tensor& whole, const Tensor& part) {
    CellWatch* watch = static_cast<CellWatch*>(pthread_getspecific(key));
    if (!watch) return;
    if (watch->newest != &whole) watch->newest = &whole, watch->attended++;
    const Tensor &queries = *whole.src[0], &keys = *whole.src[1], &values = *whole.src[2], &mask = *whole.src[3];
    for (WatchedLayer& layer : watch->layers) {
        const bool known = keys.type == values.type && keys.ne[3] == 1 && keys.ne[0] == values.ne[0] && queries.ne[1] == watch->count;
        if (layer.number != watch->attended - 1 || !known) continue;
        int64_t flagged = 0;
        for (int64_t row = 0; row < watch->count; row++) flagged += watch->flags[row] != 0;
        if (!flagged || (!layer.rows && !begin_layer(layer, whole, flagged))) return;
        // The first row of the part, from the addresses of its queries and of all queries.
        const int64_t first = (static_cast<const char*>(part.src[0]->data) - static_cast<const char*>(queries.data)) / static_cast<int64_t>(queries.nb[1]);
        for (int64_t row = 0, place = 0; row < watch->count; row++) {
            if (!watch->flags[row]) continue;
            if (row >= first && row < first + part.src[0]->ne[1]) {
                memcpy(layer.masks + place * layer.cells, static_cast<const char*>(mask.data) + static_cast<size_t>(row) * mask.nb[1],
                       static_cast<size_t>(layer.cells) * 2);
                layer.rows++;
            }
            place++;
        }
    }
}

}  // namespace edge::ggml

using namespace edge;
using namespace edge::ggml;

// Creates a watch on the layers with these numbers; null without enough memory.
EDGE_EXPORT CellWatch* edge_ggml_watch_new(int64_t first, int64_t second) {
    CellWatch* watch = static_cast<CellWatch*>(calloc(1, sizeof(CellWatch)));
    if (watch) watch->layers[0].number = first, watch->layers[1].number = second;
    return watch;
}

EDGE_EXPORT void edge_ggml_watch_free(CellWatch* watch) {
    for (WatchedLayer& layer : watch->layers) free(layer.masks);
    free(watch);
}

// Watches this thread's next forward, of `count` rows, and forgets the previous one; null stops watching. The caller keeps `flags` alive.
EDGE_EXPORT void edge_ggml_watch(CellWatch* watch, const int8_t* flags, int64_t count) {
    pthread_setspecific(key, watch);
    if (!watch) return;
    watch->flags = flags, watch->count = count, watch->newest = nullptr, watch->attended = 0;
    for (WatchedLayer& layer : watch->layers) layer.rows = 0;
}

// Describes the cells that flagged row `row` attends to in a layer: writes their numbers, at most `room`, and the fields of `source` for them.
// Returns how many cells there are, 0 if nothing is known about the row.
EDGE_EXPORT int64_t edge_ggml_watch_cells(const CellWatch* watch, int64_t layer, int64_t row, DraftSource* source, int32_t* cells, int64_t room) {
    if (layer < 0 || layer >= kWatchedLayers) return 0;
    const WatchedLayer& from = watch->layers[layer];
    if (row < 0 || row >= from.rows) return 0;
    source->type = from.source.type, source->kv_heads = from.source.kv_heads;
    source->keys = from.source.keys, source->values = from.source.values;
    source->key_step = from.source.key_step, source->value_step = from.source.value_step;
    source->key_head = from.source.key_head, source->value_head = from.source.value_head;
    const uint16_t* mask = from.masks + row * from.cells;
    int64_t count = 0;
    for (int64_t cell = 0; cell < from.cells; cell++) {
        if (count < room) cells[count] = static_cast<int32_t>(cell);
        count += mask[cell] != kHidden;
    }
    source->cells = cells, source->count = count < room ? count : room;
    return count;
}
