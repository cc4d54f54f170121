// Products with activations that were rounded by a scale fixed in training. Rows are rounded in parts, by any thread, and multiplied as a whole.
#pragma once
#include "layout.h"

namespace edge {

// A matrix as its rows are rounded: in parts. Their octets lie as those of whole rows do.
inline PackedMatrix in_parts(const PackedMatrix& m) {
    PackedMatrix parts = m;
    parts.block = kMaxPart;
    while (m.inputs % parts.block) parts.block /= 2;
    return parts;
}

struct StaticRows {
    PackedMatrix parts_of;
    RoundedRows parts, whole;

    // Over memory that begins at a line.
    StaticRows(const PackedMatrix& m, int64_t rows, void* memory) : parts_of(in_parts(m)), parts(parts_of, rows, memory), whole(parts) {
        whole.scales = reinterpret_cast<float*>(parts.starts + parts_of.blocks() * rows);
        whole.starts = reinterpret_cast<int32_t*>(whole.scales + rows);
    }
    // Bytes of that memory.
    static size_t bytes(const PackedMatrix& m, int64_t rows) { return RoundedRows::bytes(in_parts(m), rows) + static_cast<size_t>(rows) * 8; }

    // What sums of whole rows start from; a row with a part that is no number has no number as its scale.
    void join(const PackedMatrix& m) const {
        for (int64_t p = 0; p < parts.panels(); p++) {
            const RoundedRows from = parts.panel(parts_of, p), to = whole.panel(m, p);
            for (int64_t r = 0; r < from.rows; r++) {
                to.scales[r] = m.static_scale;
                to.starts[r] = 0;
                for (int64_t at = r; at < from.rows * parts_of.blocks(); at += from.rows) {
                    to.starts[r] += from.starts[at];
                    if (from.scales[at] != m.static_scale) to.scales[r] = from.scales[at];
                }
            }
        }
    }
};

// Multiplies all rows with the tiles [first, last) and rounds the results by a scale; 0: they stay as they are.
inline void multiply_static(const Variant& variant, const PackedMatrix& m, const StaticRows& rows, int64_t first, int64_t last, const Products& out, float scale) {
    variant.multiply(m, rows.whole, first, last, out);
    const int64_t begin = first * kTile, end = last * kTile < m.outputs ? last * kTile : m.outputs;
    for (int64_t r = 0; scale > 0 && begin < end && r < rows.whole.rows; r++) variant.round_levels(out.at(r, begin), end - begin, scale);
}

}  // namespace edge
