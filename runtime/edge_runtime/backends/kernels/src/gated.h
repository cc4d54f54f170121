// gelu(gates) * values for two products with the same rows. A few outputs are computed for all panels at a time, so neither product is ever in
// memory as a whole.
#pragma once
#include "layout.h"

namespace edge {

constexpr int64_t kMaxWidth = kSuper;

// Tile t of the gates goes with tile t + offset of the values.
struct GatedWeights {
    const PackedMatrix &gates, &values;
    int64_t offset;
};

// How many outputs are gated at a time: whole blocks of inputs of the next product.
inline int64_t gated_width(int64_t block) { return block < kTilesAtOnce * kTile ? kTilesAtOnce * kTile : block; }

// Calls `use` with the number of each panel and its gated outputs [rows, width], from tile `first` on.
template <class Use>
void each_gated_panel(const Variant& variant, const GatedWeights& weights, const RoundedRows& rows, int64_t first, int64_t width, Use use) {
    alignas(kLine) float gates[kMaxRows * kMaxWidth], values[kMaxRows * kMaxWidth];
    const int64_t tiles = width / kTile, other = first + weights.offset;
    for (int64_t p = 0; p < rows.panels(); p++) {
        const RoundedRows panel = rows.panel(weights.gates, p);
        variant.multiply(weights.gates, panel, first, first + tiles, {gates, width, first});
        variant.multiply(weights.values, panel, other, other + tiles, {values, width, other});
        variant.gate(gates, values, gates, panel.rows * width);
        use(p, gates);
    }
}

// Rounds a panel's gated outputs to inputs of the next product.
inline void round_gated(const Variant& variant, const float* gated, int64_t first, int64_t width, const PackedMatrix& next, const RoundedRows& panel) {
    const int64_t block = first * kTile / next.block;
    for (int64_t r = 0; r < panel.rows; r++) variant.round(gated + r * width, next, block, block + width / next.block, r, panel);
}

}  // namespace edge
