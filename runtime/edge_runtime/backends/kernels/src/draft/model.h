// A drafter in memory, made from structures that Python fills in (kernels/draft.py): its weights are checked and packed.
#pragma once
#include "draft/steps.h"
#include "variants.h"

namespace edge {

constexpr int64_t kMaxDraftLayers = 64, kMaxSources = 8, kMaxWidth = int64_t{1} << 20, kMaxVocabulary = int64_t{1} << 24;
constexpr int64_t kLayerNorms = 5, kLayerMatrices = 5;
enum LayerNorm { kBeforeAttention, kOfQueries, kBehindAttention, kBeforeFeed, kBehindFeed };
enum LayerMatrix { kQueries, kOutput, kGates, kValues, kDown };

// A matrix [outputs, inputs] in the format of its file. `kind` 0: there is none. 1: levels of `type` bits in blocks of `block` inputs with
// float32 scales, as MatMulNBits stores them. 2: `type` is one of enum ggml_type, and a row has `block` bytes; float types are not copied.
struct DraftMatrix {
    int64_t kind, type, block, outputs, inputs;
    const void* data;
    const float* scales;
};

struct DraftLayer {
    DraftMatrix matrices[kLayerMatrices];
    const float* norms[kLayerNorms];  // the query norm is [dim], all others [hidden]
    int64_t dim, source;
    double factor;
};

// Expands the embedding row at `row` to `count` floats.
using ReadEmbedding = void (*)(const void* row, float* to, int64_t count);

struct DraftShape {
    int64_t hidden, target, heads, layers, sources, vocabulary;
    // The sparse head; 0 centroids if the head is dense.
    int64_t centroids, per_centroid, top;
    double epsilon;
    DraftMatrix before, after, centroid_rows, rows;  // [hidden, 2 target], [target, hidden], [centroids, hidden], [vocabulary, hidden]
    const DraftLayer* layer;
    const float* norm;
    const int32_t* order;  // [centroids, per_centroid]: the token of each row
    // The target's embedding, scaled by `factor`: levels as in a DraftMatrix of kind 1, or rows `step` bytes apart that `read` expands.
    DraftMatrix embedding;
    ReadEmbedding read;
    int64_t step;
    double factor;
    int64_t threads;  // if 2 or more, a second thread helps
};

// The K/V rows that some layers read: rows are `key_step` bytes apart, heads `key_head` bytes.
struct DraftSource {
    int64_t type, kv_heads, count;
    const char *keys, *values;
    int64_t key_step, value_step, key_head, value_head;
    const int32_t* cells;                      // the numbers of the rows; null: the first `count` rows
    const float *key_scales, *value_scales;    // [kv_heads, dim], of int8 rows only
    const float *cosine, *sine;                // [dim / 2], of the draft's position
    int64_t key_turn, value_turn;              // width of the Hadamard rotation that rows were stored with, 0 for none
};

struct StopRule;

struct DraftCall {
    int64_t token, steps;
    const float* hidden;         // [target]
    const DraftSource* sources;
    double least;                // a draft ends before a token with a lower probability
    const StopRule* rule;        // may be null
    // Chooses a token; null: the likeliest is taken. Gets the number of the draft token, and the likeliest token. Returns the token, -1 to end
    // the draft without a token, or -2 - token to end it with this token.
    int64_t (*choose)(int64_t number, int64_t likeliest);
    int64_t* tokens;             // [steps]
    float* probabilities;        // [steps], of the likeliest token
    int64_t drafted;
    int64_t helped;              // pieces that the second thread has run, in all drafts of this model
};

struct DraftModel;

// Returns null if there is not enough memory or the parts do not fit together; `reason` then says why.
DraftModel* new_draft_model(const Variant& variant, const DraftShape& shape, const char** reason);
void free_draft_model(DraftModel* model);
// Returns null, or why nothing was drafted.
const char* run_draft(DraftModel& model, DraftCall& call);

}  // namespace edge
