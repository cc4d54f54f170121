// Products with activations that are rounded with a static scale, fixed in training. Rows are rounded in parts, by any thread, and multiplied whole.
#pragma once
#include "layout.h"

namespace edge {

// Describes a matrix for rounding its rows in parts. The octets of the parts have the same layout as those of whole rows.
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

    // Computes the scales and starts of whole rows from those of the parts. If a part contains NaN, the scale of its row becomes NaN.
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

// Multiplies all rows with the tiles [first, last) and rounds the results with `scale`, unless that is 0.
inline void multiply_static(const Variant& variant, const PackedMatrix& m, const StaticRows& rows, int64_t first, int64_t last, const Products& out, float scale) {
    variant.multiply(m, rows.whole, first, last, out);
    const int64_t begin = first * kTile, end = last * kTile < m.outputs ? last * kTile : m.outputs;
    for (int64_t r = 0; scale > 0 && begin < end && r < rows.whole.rows; r++) variant.round_levels(out.at(r, begin), end - begin, scale);
}

}  // namespace edge
