#include "feed_forward.h"

#include <string.h>

#include "gated.h"
#include "multiply.h"
#include "weights.h"

namespace edge::ggml {
namespace {

// A mark is stored in the last parameter of a product or GLU, which neither uses.
enum Mark : int32_t { kUnmarked, kComputed, kLeftOut, kJoins, kRounds };
constexpr int kMarkParameter = 15;
int32_t mark_of(const Tensor& t) { return t.op == kMulMat || t.op == kGlu ? t.op_params[kMarkParameter] : kUnmarked; }
void set_mark(Tensor& t, Mark mark) { t.op_params[kMarkParameter] = mark; }

int64_t width_of(const Tensor& op) { return gated_width(packed_matrix(*op.src[0]->src[0]).block); }

// Removes the marks of a reader's sources that are valid only without another reader.
void keep_floats(const Tensor& reader) {
    for (Tensor* source : reader.src) {
        if (!source) continue;
        const int32_t mark = mark_of(*source);
        if (mark == kLeftOut) set_mark(*source, kComputed);
        if (mark == kRounds) set_mark(*source, kJoins);
    }
}

// Whether `op` can compute its two products. They must come right before it, so that their inputs are not overwritten meanwhile.
bool can_join(const Tensor& op, const Tensor* before, const Tensor* earlier) {
    const Tensor *gates = op.src[0], *values = op.src[1];
    if (op.op != kGlu || !values || op.op_params[1] || !((gates == before && values == earlier) || (gates == earlier && values == before))) return false;
    const bool products = mark_of(*gates) == kComputed && mark_of(*values) == kComputed && gates->src[1] == values->src[1];
    if (!products || gates->src[0]->type != values->src[0]->type || (gates->flags | values->flags) & kOutput) return false;
    return op.ne[2] == 1 && op.ne[3] == 1 && op.nb[1] == static_cast<size_t>(op.ne[0]) * 4 && op.ne[0] % width_of(op) == 0;
}

bool can_round(const Tensor& op, const Tensor& product) {
    return mark_of(op) == kJoins && !(op.flags & kOutput) && mark_of(product) == kComputed && product.src[1] == &op &&
           product.src[0]->type == op.src[0]->src[0]->type;
}

// Calls `use` with each run and its rounded rows, which are one after the other in work memory.
template <class Use>
void each_run(const Work& work, const PackedMatrix& m, const ReadRows& rows, Use use) {
    uintptr_t at = reinterpret_cast<uintptr_t>(work.memory);
    for (int i = 0; i < rows.count; i++) {
        at = (at + kAlignment - 1) / kAlignment * kAlignment;
        use(i, rows.runs[i], RoundedRows(m, rows.runs[i].count, reinterpret_cast<void*>(at)));
        at += RoundedRows::bytes(m, rows.runs[i].count);
    }
}

}  // namespace

void plan_feed_forward(Tensor& node, bool ours, Tensor* before, Tensor* earlier) {
    if (before && earlier && can_round(*earlier, *before)) set_mark(*earlier, kRounds);
    keep_floats(node);
    if (node.op != kGlu && !ours) return;
    set_mark(node, ours ? kComputed : kUnmarked);
    if (!can_join(node, before, earlier)) return;
    set_mark(*before, kLeftOut);
    set_mark(*earlier, kLeftOut);
    set_mark(node, kJoins);
}

bool is_left_out(const Tensor& product) { return mark_of(product) == kLeftOut; }
bool joins_products(const Tensor& op) { return mark_of(op) == kJoins || mark_of(op) == kRounds; }
bool is_rounded(const Tensor& op) { return mark_of(op) == kRounds; }

size_t gates_memory(const Tensor& op) { return multiply_memory(*op.src[0]) + kMaxRuns * 2 * kAlignment; }

bool compute_gates(const Functions& ggml, const Variant& variant, const Work& work, const Tensor& op, const ReadRows* read) {
    if (work.size < gates_memory(op)) return false;
    const Tensor& input = *op.src[0]->src[1];
    const PackedMatrix gates = packed_matrix(*op.src[0]->src[0]), values = packed_matrix(*op.src[1]->src[0]);
    const ReadRows all = {op.ne[1], 1, {{0, op.ne[1]}}}, &rows = read ? *read : all;
    PackedMatrix next = gates;
    next.inputs = op.ne[0];
    // The output may have the memory of the input, so all rows are rounded before any is written.
    each_run(work, gates, rows, [&](int, const ReadRows::Run& run, const RoundedRows& to) { round_part(variant, work, input, run.first, gates, to); });
    const int64_t width = width_of(op), outputs = op.ne[0], chunks = outputs / width, step = parts_of_piece(work, chunks, 1);
    each_run(work, gates, rows, [&](int number, const ReadRows::Run& run, const RoundedRows& rounded) {
        if (number) ggml.barrier(work.pool);
        if (work.thread == 0) ggml.set_chunk(work.pool, work.threads);
        ggml.barrier(work.pool);
        float* out = reinterpret_cast<float*>(static_cast<char*>(op.data) + static_cast<size_t>(run.first) * op.nb[1]);
        const RoundedRows hidden(next, run.count, out);
        for (Pieces pieces(ggml, work, (chunks + step - 1) / step); pieces.left(); pieces.next())
            for (int64_t chunk = pieces.current * step; chunk < (pieces.current + 1) * step && chunk < chunks; chunk++) {
                const int64_t first = chunk * width / kTile;
                each_gated_panel(variant, {gates, values, 0}, rounded, first, width, [&](int64_t p, const float* gated) {
                    if (is_rounded(op)) return round_gated(variant, gated, first, width, next, hidden.panel(next, p));
                    for (int64_t r = rounded.first_row(p); r < rounded.first_row(p + 1); r++, gated += width)
                        memcpy(out + r * outputs + first * kTile, gated, static_cast<size_t>(width) * sizeof(float));
                });
            }
    });
    return true;
}

}  // namespace edge::ggml
