// A whole draft in one call: embedding and hidden row, layers on the target's own K/V rows, head, choice of the token, stop rule.
// Math: transformers, Gemma4AssistantForCausalLM and Gemma4AssistantMaskedEmbedder. All steps use the position of the first one.
#include "draft/model.h"

#include <stdlib.h>
#include <string.h>

#include "draft/helper.h"
#include "draft/stop_rule.h"
#include "export.h"
#include "ggml/weights.h"
#include "pack.h"

namespace edge {
namespace {

constexpr int64_t kGguf = 2, kLevels = 1;
constexpr int64_t kNoToken = -1;
constexpr int64_t kPieceBytes = 24 << 10;  // bytes of weights that a thread takes at a time, approximately
constexpr int64_t kSpansAtOnce = 16;       // spans whose states are kept until they are merged

size_t whole_lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// A matrix ready to multiply with: packed, or floats in the file's memory.
struct Matrix {
    bool packed = false;
    PackedMatrix levels = {};
    FloatProduct floats = {};
    int64_t outputs = 0, inputs = 0;
};

ggml::Tensor tensor_of(const DraftMatrix& m) {
    ggml::Tensor tensor = {};
    tensor.type = static_cast<int>(m.type);
    tensor.ne[0] = m.inputs, tensor.ne[1] = m.outputs, tensor.ne[2] = tensor.ne[3] = 1;
    tensor.nb[1] = static_cast<size_t>(m.block);
    return tensor;
}

bool is_float(const DraftMatrix& m) { return m.kind == kGguf && (m.type == ggml::kF32 || m.type == ggml::kF16 || m.type == ggml::kBf16); }

bool is_width(int64_t size) { return size > 0 && size <= kMaxWidth; }

// Whether the matrix has this shape, and the kernels can multiply with it.
bool fits_matrix(const DraftMatrix& m, int64_t outputs, int64_t inputs) {
    if (m.outputs != outputs || m.inputs != inputs || outputs > kMaxVocabulary || !is_width(inputs) || !m.data) return false;
    if (is_float(m)) return m.block == inputs * (m.type == ggml::kF32 ? 4 : 2);
    if (m.kind == kLevels) return m.scales && fits(outputs, inputs, m.type, m.block);
    return m.kind == kGguf && m.type == static_cast<int>(m.type) && ggml::packs(tensor_of(m));
}

// Bytes of the packed matrix; 0 for floats.
size_t packed_bytes(const DraftMatrix& m) {
    if (is_float(m)) return 0;
    if (m.kind == kGguf) return whole_lines(ggml::packed_bytes(tensor_of(m)));
    return whole_lines(PackedMatrix{m.outputs, m.inputs, static_cast<int>(m.type), static_cast<int>(m.block), false, nullptr, nullptr}.bytes());
}

// Packs the matrix into `memory`. Returns false if there is not enough memory to do so.
bool make(Matrix& to, const DraftMatrix& m, uint8_t* memory) {
    to.outputs = m.outputs, to.inputs = m.inputs;
    to.packed = !is_float(m);
    if (!to.packed) {
        const FloatType type = m.type == ggml::kF32 ? FloatType::kF32 : m.type == ggml::kF16 ? FloatType::kF16 : FloatType::kBf16;
        to.floats = {type, static_cast<const char*>(m.data), static_cast<size_t>(m.block), m.inputs, nullptr, 0, 1, nullptr, 0};
    } else if (m.kind == kGguf) {
        ggml::Tensor tensor = tensor_of(m);
        ggml::pack_weights(tensor, m.data, memory);
        tensor.data = memory;
        to.levels = ggml::packed_matrix(tensor);
    } else {
        if (!pack(to.levels, m.outputs, m.inputs, static_cast<int>(m.type), static_cast<int>(m.block), static_cast<const uint8_t*>(m.data), m.scales)) return false;
        const size_t level_bytes = to.levels.level_bytes();
        memcpy(memory, to.levels.levels, to.levels.bytes());
        release(to.levels);
        to.levels.levels = memory, to.levels.scales = memory + level_bytes;
    }
    return true;
}

struct Layer {
    Matrix matrices[kLayerMatrices];
    const float* norms[kLayerNorms];
    int64_t dim, source;
    float factor;
};

// Work memory: all buffers are parts of one allocation.
struct Buffers {
    float *joined, *row, *normed, *queries, *attended, *gates, *values, *part, *scores, *shares, *maxima, *rest, *twice, *states;
    int32_t *best, *candidates;
    char* rounded;
    size_t bytes = 0;

    // The largest widths in any layer: `feed` of the feed-forward, `wide` of all queries, `dim` of one head. `scored`: how many tokens get a score.
    Buffers(const DraftShape& s, int64_t feed, int64_t wide, int64_t dim, int64_t scored, void* memory) {
        char* const begin = static_cast<char*>(memory);
        const auto take = [&]<class Type>(Type*& to, int64_t count) {
            to = begin ? reinterpret_cast<Type*>(begin + bytes) : nullptr;
            bytes += whole_lines(static_cast<size_t>(count + kTile) * sizeof(Type));
        };
        const int64_t centroids = s.centroids + kTile * kTile;
        take(joined, 2 * s.target), take(row, s.hidden), take(normed, s.hidden), take(queries, wide), take(attended, wide);
        take(gates, feed), take(values, feed), take(part, s.hidden > s.target ? s.hidden : s.target), take(scores, scored);
        take(shares, centroids), take(maxima, centroids / kTile + kTile), take(rest, s.hidden), take(twice, 2 * s.top * s.per_centroid);
        take(states, (kSpansAtOnce + 2) * kDraftQueries * (dim + 2));
        take(best, s.top), take(candidates, s.centroids ? scored : 0);
        // Two rounded rows of the widest input of a product: levels, a scale and a start for each 16 of them, and sums of super-blocks.
        int64_t widest = 2 * s.target;
        const int64_t widths[] = {s.hidden, feed, wide};
        for (const int64_t width : widths) widest = width > widest ? width : widest;
        take(rounded, 2 * (widest + kLine) * 4);
    }
};

}  // namespace

struct DraftModel {
    const Variant& variant;
    DraftShape shape;
    Matrix before, after, centroid_rows, rows;
    Layer* layers;
    Buffers at;
    uint8_t* weights;
    int64_t scored;  // how many tokens get a score
    Helper* helper;

    void multiply(const Matrix& m, const float* values, float* out) const {
        if (m.packed) {
            const PackedMatrix& p = m.levels;
            const RoundedRows rounded(p, 1, at.rounded);
            variant.round(values, p, 0, p.blocks(), 0, rounded);
            // A multiple of kTilesAtOnce, since kernels multiply several tiles at once.
            const int64_t each = (kPieceBytes / static_cast<int64_t>(p.tile_bytes()) + kTilesAtOnce) / kTilesAtOnce * kTilesAtOnce;
            return each_piece(helper, (p.tiles() + each - 1) / each, [&](int64_t piece) {
                const int64_t first = piece * each, last = first + each;
                variant.multiply(p, rounded, first, last < p.tiles() ? last : p.tiles(), {p, out});
            });
        }
        FloatProduct product = m.floats;
        product.values = reinterpret_cast<const char*>(values), product.value_bytes = static_cast<size_t>(m.inputs) * 4;
        product.out = out, product.stride = m.outputs;
        const int64_t each = kPieceBytes / static_cast<int64_t>(product.weight_bytes) + 1;
        each_piece(helper, (m.outputs + each - 1) / each, [&](int64_t piece) {
            const int64_t first = piece * each, last = first + each;
            variant.multiply_floats(product, first, last < m.outputs ? last : m.outputs);
        });
    }

    void embed(int64_t token) const {
        const DraftMatrix& m = shape.embedding;
        const float factor = static_cast<float>(shape.factor);
        float* out = at.joined;
        if (shape.read) {
            shape.read(static_cast<const char*>(m.data) + token * shape.step, out, shape.target);
            for (int64_t i = 0; i < shape.target; i++) out[i] *= factor;
            return;
        }
        if (m.kind == kGguf) {
            for (int64_t i = 0; i < shape.target; i++) out[i] = static_cast<const float*>(m.data)[token * shape.target + i] * factor;
            return;
        }
        const uint8_t* levels = static_cast<const uint8_t*>(m.data) + token * (shape.target * m.type / 8);
        const float* scales = m.scales + token * (shape.target / m.block);
        for (int64_t i = 0; i < shape.target; i++) {
            const int level = m.type == 8 ? levels[i] - 128 : (levels[i / 2] >> i % 2 * 4 & 15) - 8;
            out[i] = static_cast<float>(level) * scales[i / m.block] * factor;
        }
    }

    void attend_rows(const VisibleRows& rows, const float* queries, int64_t count) const;
    void attend(const Layer& layer, const DraftSource& source) const;
    void run_layer(const Layer& layer, const DraftSource& source) const;
    void score() const;
    int64_t likeliest(float greatest) const;
    int64_t choose(const DraftCall& call) const;
};

namespace {

const double kNothing = 0;
const StopRule kNoRule = {0, 1, 0, 0, &kNothing, &kNothing, &kNothing, &kNothing, &kNothing, &kNothing};

// Applies a Hadamard rotation, which is its own inverse, to each group of `width` values.
void turn(float* values, int64_t count, int64_t width) {
    if (!width) return;
    const float factor = 1.0f / __builtin_sqrtf(static_cast<float>(width));
    for (float* piece = values; piece < values + count; piece += width) {
        for (int64_t half = 1; half < width; half *= 2)
            for (int64_t i = 0; i < width; i += 2 * half)
                for (int64_t j = i; j < i + half; j++) {
                    const float one = piece[j], other = piece[j + half];
                    piece[j] = one + other, piece[j + half] = one - other;
                }
        for (int64_t i = 0; i < width; i++) piece[i] *= factor;
    }
}

void scale(float* values, const float* scales, int64_t count) {
    for (int64_t i = 0; scales && i < count; i++) values[i] *= scales[i];
}

}  // namespace

// The memory of states begins with the merged states of the queries, followed by those of the spans that are attended to next. Each span has
// room for as many again, which are work memory.
void DraftModel::attend_rows(const VisibleRows& rows, const float* queries, int64_t count) const {
    const int64_t of_span = count * (rows.dim + 2), spans = (rows.count + kDraftSpan - 1) / kDraftSpan;
    for (int64_t done = 0; done < spans; done += kSpansAtOnce) {
        const int64_t now = spans - done < kSpansAtOnce ? spans - done : kSpansAtOnce;
        each_piece(helper, now, [&](int64_t piece) {
            const int64_t first = (done + piece) * kDraftSpan, last = first + kDraftSpan;
            float* states = at.states + (piece + (done != 0)) * of_span;
            variant.draft->attend(rows, queries, count, first, last < rows.count ? last : rows.count, states);
        });
        for (int64_t span = done ? 0 : 1; span < now; span++)
            for (int64_t r = 0; r < count; r++) {
                float* state = at.states + r * (rows.dim + 2);
                variant.attend.merge(rows.dim, state, state + (span + (done != 0)) * of_span);
            }
    }
}

void DraftModel::attend(const Layer& layer, const DraftSource& source) const {
    const DraftSteps& steps = *variant.draft;
    const int64_t dim = layer.dim, state = dim + 2, group = shape.heads / source.kv_heads;
    for (int64_t head = 0; head < source.kv_heads; head++) {
        const VisibleRows rows = {static_cast<RowType>(source.type), source.keys + head * source.key_head, source.values + head * source.value_head,
                                  static_cast<size_t>(source.key_step), static_cast<size_t>(source.value_step), source.cells, source.count, dim};
        for (int64_t first = 0; first < group; first += kDraftQueries) {
            const int64_t count = group - first < kDraftQueries ? group - first : kDraftQueries, query = head * group + first;
            float* queries = at.queries + query * dim;
            for (int64_t r = 0; r < count; r++) {
                steps.norm(queries + r * dim, layer.norms[kOfQueries], dim, static_cast<float>(shape.epsilon), queries + r * dim);
                steps.rotate(queries + r * dim, dim, source.cosine, source.sine);
                turn(queries + r * dim, dim, source.key_turn);
                scale(queries + r * dim, source.key_scales ? source.key_scales + head * dim : nullptr, dim);
            }
            attend_rows(rows, queries, count);
            for (int64_t r = 0; r < count; r++) {
                const float *from = at.states + r * state, inverse = 1.0f / from[dim + 1];
                float* out = at.attended + (query + r) * dim;
                for (int64_t i = 0; i < dim; i++) out[i] = from[i] * inverse;
                scale(out, source.value_scales ? source.value_scales + head * dim : nullptr, dim);
                turn(out, dim, source.value_turn);
            }
        }
    }
}

void DraftModel::run_layer(const Layer& layer, const DraftSource& source) const {
    const DraftSteps& steps = *variant.draft;
    const float epsilon = static_cast<float>(shape.epsilon);
    const Matrix* m = layer.matrices;
    steps.norm(at.row, layer.norms[kBeforeAttention], shape.hidden, epsilon, at.normed);
    multiply(m[kQueries], at.normed, at.queries);
    attend(layer, source);
    multiply(m[kOutput], at.attended, at.part);
    steps.add_norm(at.row, at.part, layer.norms[kBehindAttention], shape.hidden, epsilon, 1.0f);
    steps.norm(at.row, layer.norms[kBeforeFeed], shape.hidden, epsilon, at.normed);
    multiply(m[kGates], at.normed, at.gates);
    multiply(m[kValues], at.normed, at.values);
    variant.gate(at.gates, at.values, at.gates, m[kGates].outputs);
    multiply(m[kDown], at.gates, at.part);
    steps.add_norm(at.row, at.part, layer.norms[kBehindFeed], shape.hidden, epsilon, layer.factor);
}

// Computes the head's scores; for a sparse head, those of the tokens of the best centroids. If a few values of a row are large, rounding it to 8
// bits leaves few levels for the others. So the rounding error is rounded too, as a second row of the same product, and both are added.
void DraftModel::score() const {
    if (!shape.centroids) return multiply(rows, at.normed, at.scores);
    multiply(centroid_rows, at.normed, at.shares);
    variant.draft->greatest(at.shares, shape.centroids, shape.top, at.maxima, at.best);
    const int64_t each = shape.per_centroid;
    if (!rows.packed) {
        each_piece(helper, shape.top, [&](int64_t n) {
            FloatProduct product = rows.floats;
            product.values = reinterpret_cast<const char*>(at.normed), product.value_bytes = static_cast<size_t>(shape.hidden) * 4;
            product.weights = rows.floats.weights + static_cast<size_t>(at.best[n] * each) * product.weight_bytes;
            product.out = at.scores + n * each, product.stride = each;
            variant.multiply_floats(product, 0, each);
        });
        return;
    }
    const PackedMatrix& m = rows.levels;
    const RoundedRows two(m, 2, at.rounded);
    variant.round(at.normed, m, 0, m.blocks(), 0, two);
    for (int64_t b = 0; b < m.blocks(); b++) {
        const int8_t* octets = two.octets(m, b, 0);
        const float scale = two.scales[b * 2];
        for (int64_t i = 0; i < m.block; i++) at.rest[b * m.block + i] = at.normed[b * m.block + i] - scale * static_cast<float>(octets[i / kOctet * two.pitch() + i % kOctet]);
    }
    variant.round(at.rest, m, 0, m.blocks(), 1, two);
    const int64_t tiles = each / kTile;
    each_piece(helper, shape.top, [&](int64_t n) {
        const int64_t first = at.best[n] * tiles;
        float* twice = at.twice + n * 2 * each;
        variant.multiply(m, two, first, first + tiles, {twice, each, first});
        for (int64_t i = 0; i < each; i++) at.scores[n * each + i] = twice[i] + twice[each + i];
    });
}

// Returns the likeliest token, the lowest of equally likely ones. If all scores are NaN, it may return any token: it is only a draft.
int64_t DraftModel::likeliest(float greatest) const {
    const DraftSteps& steps = *variant.draft;
    const int64_t each = shape.per_centroid;
    int64_t token = shape.vocabulary, place = steps.find(at.scores, scored, greatest, 0);
    if (!shape.centroids) return place < scored ? place : 0;
    for (; place < scored; place = steps.find(at.scores, scored, greatest, place + 1)) {
        const int64_t other = shape.order[at.best[place / each] * each + place % each];
        token = other < token ? other : token;
    }
    return token < shape.vocabulary ? token : shape.order[0];
}

// Chooses the next token. Its result is that of DraftCall::choose.
int64_t DraftModel::choose(const DraftCall& call) const {
    float greatest, sum;
    variant.draft->softmax(at.scores, scored, greatest, sum);
    call.probabilities[call.drafted] = 1.0f / sum;
    if (static_cast<double>(1.0f / sum) < call.least) return kNoToken;
    if (!call.choose) return likeliest(greatest);
    for (int64_t n = 0; shape.centroids && n < shape.top; n++)
        memcpy(at.candidates + n * shape.per_centroid, shape.order + at.best[n] * shape.per_centroid, static_cast<size_t>(shape.per_centroid) * 4);
    rest_helper(helper);  // the callback may take long
    const int64_t token = call.choose(call.drafted, likeliest(greatest));
    wake_helper(helper);
    return token;
}

namespace {

const char* draft(DraftModel& m, DraftCall& call) {
    const DraftShape& s = m.shape;
    call.drafted = 0;
    for (int64_t n = 0; n < s.layers; n++) {
        const DraftSource& source = call.sources[m.layers[n].source];
        const int64_t dim = m.layers[n].dim;
        if (source.type < 0 || source.type >= kRowTypes || dim % values_of_unit(static_cast<RowType>(source.type))) return "the type of K/V rows";
        if (source.kv_heads < 1 || s.heads % source.kv_heads || source.count < 1) return "the number of K/V rows";
        const int64_t turns[] = {source.key_turn, source.value_turn};
        for (const int64_t width : turns)
            if (width < 0 || width > dim || (width && (dim % width || width & (width - 1)))) return "the rotation of K/V rows";
    }
    if (call.token < 0 || call.token >= s.vocabulary) return "the token";
    memcpy(m.at.joined + s.target, call.hidden, static_cast<size_t>(s.target) * 4);
    if (call.rule && (call.rule->longest < 1 || call.rule->bins < 1)) return "the rule";
    RuledDraft ruled(call.rule ? *call.rule : kNoRule);
    for (int64_t token = call.token; call.drafted < call.steps;) {
        m.embed(token);
        m.multiply(m.before, m.at.joined, m.at.row);
        for (int64_t n = 0; n < s.layers; n++) m.run_layer(m.layers[n], call.sources[m.layers[n].source]);
        m.variant.draft->norm(m.at.row, s.norm, s.hidden, static_cast<float>(s.epsilon), m.at.normed);
        m.score();
        token = m.choose(call);
        if (token == kNoToken) break;
        const bool last = token < kNoToken;
        if (last) token = kNoToken - 1 - token;
        if (token < 0 || token >= s.vocabulary) return "the chosen token";
        call.tokens[call.drafted] = token;
        const bool over = call.rule && !ruled.add(static_cast<double>(call.probabilities[call.drafted]));
        if (++call.drafted == call.steps || last || over) break;
        m.multiply(m.after, m.at.normed, m.at.part);
        memcpy(m.at.joined + s.target, m.at.part, static_cast<size_t>(s.target) * 4);
    }
    return nullptr;
}

}  // namespace

const char* run_draft(DraftModel& m, DraftCall& call) {
    wake_helper(m.helper);
    const char* wrong = draft(m, call);
    rest_helper(m.helper);
    call.helped = helped_pieces(m.helper);
    return wrong;
}

namespace {

// Returns why a drafter cannot have this shape, or null.
const char* unsound(const DraftShape& s) {
    if (!is_width(s.hidden) || !is_width(s.target) || s.heads < 1 || s.heads > kMaxWidth || s.layers < 1 || s.layers > kMaxDraftLayers) return "its sizes";
    if (s.sources < 1 || s.sources > kMaxSources || s.vocabulary < 1 || s.vocabulary > kMaxVocabulary || !s.layer || !s.norm) return "its sizes";
    if (!fits_matrix(s.before, s.hidden, 2 * s.target) || !fits_matrix(s.after, s.target, s.hidden)) return "its projections";
    if (!fits_matrix(s.rows, s.vocabulary, s.hidden)) return "its head";
    if (s.centroids) {
        const bool sizes = s.centroids > 0 && s.per_centroid > 0 && s.top > 0 && s.top <= s.centroids && s.vocabulary / s.centroids == s.per_centroid;
        if (!sizes || s.centroids * s.per_centroid != s.vocabulary || !s.order || !fits_matrix(s.centroid_rows, s.centroids, s.hidden)) return "its centroids";
        if (!is_float(s.rows) && s.per_centroid % kTile) return "the number of tokens of a centroid";
        for (int64_t i = 0; i < s.vocabulary; i++)
            if (s.order[i] < 0 || s.order[i] >= s.vocabulary) return "the order of its tokens";
    }
    const DraftMatrix& e = s.embedding;
    if (e.outputs != s.vocabulary || e.inputs != s.target || !e.data || (s.read && s.step < 1)) return "the embedding";
    if (!s.read && !(e.kind == kLevels ? (e.type == 4 || e.type == 8) && fits_matrix(e, s.vocabulary, s.target) : e.kind == kGguf && e.type == ggml::kF32)) return "the embedding";
    for (int64_t n = 0; n < s.layers; n++) {
        const DraftLayer& l = s.layer[n];
        if (!is_width(l.dim) || l.dim % kTile || l.source < 0 || l.source >= s.sources || !is_width(s.heads * l.dim)) return "the heads of a layer";
        const int64_t feed = l.matrices[kGates].outputs;
        const bool attention = fits_matrix(l.matrices[kQueries], s.heads * l.dim, s.hidden) && fits_matrix(l.matrices[kOutput], s.hidden, s.heads * l.dim);
        const bool gates = is_width(feed) && fits_matrix(l.matrices[kGates], feed, s.hidden) && fits_matrix(l.matrices[kValues], feed, s.hidden);
        if (!attention || !gates || !fits_matrix(l.matrices[kDown], s.hidden, feed)) return "the matrices of a layer";
        for (const float* norm : l.norms)
            if (!norm) return "the norms of a layer";
    }
    return nullptr;
}

// Calls `use` for each matrix of a model and its description, in the order in which a draft uses them, which is that of their memory too.
template <class Use>
bool each_matrix(DraftModel& m, const DraftShape& s, Use use) {
    bool done = use(m.before, s.before);
    for (int64_t n = 0; n < s.layers; n++)
        for (int i = 0; i < kLayerMatrices; i++) done = done && use(m.layers[n].matrices[i], s.layer[n].matrices[i]);
    if (s.centroids) done = done && use(m.centroid_rows, s.centroid_rows);
    return done && use(m.after, s.after) && use(m.rows, s.rows);
}

}  // namespace

DraftModel* new_draft_model(const Variant& variant, const DraftShape& shape, const char** reason) {
    if ((*reason = unsound(shape))) return nullptr;
    int64_t feed = 0, dim = 0;
    for (int64_t n = 0; n < shape.layers; n++) {
        const DraftLayer& layer = shape.layer[n];
        feed = layer.matrices[kGates].outputs > feed ? layer.matrices[kGates].outputs : feed;
        dim = layer.dim > dim ? layer.dim : dim;
    }
    const int64_t scored = shape.centroids ? shape.top * shape.per_centroid : shape.vocabulary, wide = shape.heads * dim;
    const size_t own = whole_lines(sizeof(DraftModel)), layers = whole_lines(static_cast<size_t>(shape.layers) * sizeof(Layer));
    const size_t work = Buffers(shape, feed, wide, dim, scored, nullptr).bytes;
    *reason = "memory";
    char* memory = static_cast<char*>(aligned_alloc(kLine, own + layers + work));
    if (!memory) return nullptr;
    memset(memory, 0, own + layers + work);
    Layer* own_layers = reinterpret_cast<Layer*>(memory + own);
    const DraftModel made = {variant, shape, {}, {}, {}, {}, own_layers, Buffers(shape, feed, wide, dim, scored, memory + own + layers), nullptr, scored, nullptr};
    memcpy(memory, static_cast<const void*>(&made), sizeof made);
    DraftModel& m = *reinterpret_cast<DraftModel*>(memory);
    for (int64_t n = 0; n < shape.layers; n++) {
        const DraftLayer& from = shape.layer[n];
        m.layers[n].dim = from.dim, m.layers[n].source = from.source, m.layers[n].factor = static_cast<float>(from.factor);
        memcpy(m.layers[n].norms, from.norms, sizeof from.norms);
    }
    size_t bytes = 0;
    each_matrix(m, shape, [&](Matrix&, const DraftMatrix& from) { return bytes += packed_bytes(from), true; });
    m.weights = static_cast<uint8_t*>(memory_for_weights(bytes + kLine));
    uint8_t* at = m.weights;
    const bool done = at && each_matrix(m, shape, [&](Matrix& to, const DraftMatrix& from) {
        const bool packed = make(to, from, at);
        at += packed_bytes(from);
        return packed;
    });
    if (!done) {
        free_draft_model(&m);
        return nullptr;
    }
    if (shape.threads > 1) m.helper = start_helper();
    *reason = nullptr;
    return &m;
}

void free_draft_model(DraftModel* model) {
    if (!model) return;
    stop_helper(model->helper);
    free(model->weights);
    free(model);
}

}  // namespace edge

using namespace edge;

// Makes a drafter for the variant of this name (null: the chosen one). Returns null if that fails; `reason` then names the part that is wrong.
EDGE_EXPORT DraftModel* edge_draft_new(const char* name, const DraftShape* shape, const char** reason) {
    const Variant* variant = name ? nullptr : chosen_variant();
    for (const Variant* const* usable = usable_variants(); name && *usable; usable++)
        if (strcmp((*usable)->name, name) == 0) variant = *usable;
    *reason = "the variant";
    return variant ? new_draft_model(*variant, *shape, reason) : nullptr;
}

EDGE_EXPORT void edge_draft_free(DraftModel* model) { free_draft_model(model); }

// Drafts. Returns null, or the name of the part that is wrong.
EDGE_EXPORT const char* edge_draft_run(DraftModel* model, DraftCall* call) { return run_draft(*model, *call); }

// Gives the callback that chooses a token the scores of the last step, and for a sparse head the candidates. Returns how many there are.
EDGE_EXPORT int64_t edge_draft_scores(const DraftModel* model, const float** scores, const int32_t** candidates) {
    *scores = model->at.scores;
    *candidates = model->shape.centroids ? model->at.candidates : nullptr;
    return model->scored;
}
