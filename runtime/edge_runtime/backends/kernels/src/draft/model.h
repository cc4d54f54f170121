// A drafter in memory: what Python describes, checked and packed. Python's side of the structures: kernels/draft.py.
#pragma once
#include "draft/steps.h"
#include "variants.h"

namespace edge {

constexpr int64_t kMaxDraftLayers = 64, kMaxSources = 8, kMaxWidth = int64_t{1} << 20, kMaxVocabulary = int64_t{1} << 24;
constexpr int64_t kLayerNorms = 5, kLayerMatrices = 5;
enum LayerNorm { kBeforeAttention, kOfQueries, kBehindAttention, kBeforeFeed, kBehindFeed };
enum LayerMatrix { kQueries, kOutput, kGates, kValues, kDown };

// A matrix [outputs, inputs] as its file has it. `kind`: 0 for none; 1 for levels of `type` bits in blocks of `block` with float32 scales, as
// MatMulNBits stores them; 2 for a type of GGUF files (enum ggml_type), `block` bytes a row; floats among them stay where they are.
struct DraftMatrix {
    int64_t kind, type, block, outputs, inputs;
    const void* data;
    const float* scales;
};

struct DraftLayer {
    DraftMatrix matrices[kLayerMatrices];
    const float* norms[kLayerNorms];  // those of queries [dim], the others [hidden]
    int64_t dim, source;
    double factor;
};

// Writes `count` values of a row of the embedding, which begins at `row`.
using ReadEmbedding = void (*)(const void* row, float* to, int64_t count);

struct DraftShape {
    int64_t hidden, target, heads, layers, sources, vocabulary;
    // Of a sparse head; 0 centroids for a dense one.
    int64_t centroids, per_centroid, top;
    double epsilon;
    DraftMatrix before, after, centroid_rows, rows;  // [hidden, 2 target], [target, hidden], [centroids, hidden], [vocabulary, hidden]
    const DraftLayer* layer;
    const float* norm;
    const int32_t* order;  // [centroids, per_centroid]: whose rows they are
    // The target's embedding: levels as DraftMatrix of kind 1, or rows that `read` expands, `step` bytes apart; times `factor`.
    DraftMatrix embedding;
    ReadEmbedding read;
    int64_t step;
    double factor;
    int64_t threads;  // 2 or more: a second thread helps
};

// The K/V rows that layers of a source read, `key_step` bytes apart, heads `key_head` apart.
struct DraftSource {
    int64_t type, kv_heads, count;
    const char *keys, *values;
    int64_t key_step, value_step, key_head, value_head;
    const int32_t* cells;                      // which rows, or null for the first `count`
    const float *key_scales, *value_scales;    // [kv_heads, dim] of int8 rows
    const float *cosine, *sine;                // of the position [dim / 2]
    int64_t key_turn, value_turn;              // width of the Hadamard rotation that they are stored in, 0 for none
};

struct StopRule;

struct DraftCall {
    int64_t token, steps;
    const float* hidden;         // [target]
    const DraftSource* sources;
    double least;                // a draft ends before a token of a lower probability
    const StopRule* rule;        // or null
    // Chooses a token: null for the likeliest. Gets its number and the likeliest; returns the token, -1 to end before it, or -2 - token to
    // end behind it.
    int64_t (*choose)(int64_t number, int64_t likeliest);
    int64_t* tokens;             // [steps]
    float* probabilities;        // [steps], of the likeliest token
    int64_t drafted;
    int64_t helped;              // pieces of all drafts of this model that the second thread has run
};

struct DraftModel;

// Null without memory, or for what does not fit together; `reason` then says why.
DraftModel* new_draft_model(const Variant& variant, const DraftShape& shape, const char** reason);
void free_draft_model(DraftModel* model);
// Returns null, or why nothing was drafted.
const char* run_draft(DraftModel& model, DraftCall& call);

}  // namespace edge
