// Skips the computation of rows that are not read.
//
// In the last layer, llama.cpp selects the rows of a batch whose logits were asked for (`out_ids`). After the last layer that owns K/V rows, a row
// depends only on itself, so from there on the rows that will not be selected need not be computed: in 20 of the 35 layers of Gemma 4 E2B.
//
// Before it computes a graph, ggml plans all its nodes in order. We collect them. When the logits are planned, the graph is walked back from there
// to its beginning. A node gets a mark in `extra`, which ggml's CPU backend leaves to buffer types, if its rows are used only by that selection of
// rows; then only the selected rows are computed. With any other reader, for example an operation that is not known here, all rows are computed as
// usual. So no operation ever reads a row that was not computed. A graph without such nodes gets no marks, for example from a llama.cpp that
// skips the rows itself.
#pragma once
#include "facts.h"

namespace edge::ggml {

constexpr int kMaxRuns = 32;  // the most runs of adjacent rows; if there are more, all rows are computed

// The rows of a batch that are read.
struct ReadRows {
    struct Run {
        int64_t first, count;
    };
    int64_t batch;
    int count;
    Run runs[kMaxRuns];
};

// An operation and its sources, cut to a run of rows. It cannot be copied, because the operation points to the sources.
class CutOperation {
  public:
    CutOperation(const Tensor& op, const ReadRows& rows, int dimension, const ReadRows::Run& run);
    CutOperation(const CutOperation&) = delete;
    Tensor* operation() { return &op_; }

  private:
    void cut_source(int number, int dimension);
    Tensor op_, sources_[4];
    int64_t first_, count_;
};

// Which rows of an operation are computed; if `rows` is null, all.
struct Restriction {
    const ReadRows* rows;
    int dimension;
};

// Must be called once, before the other functions. Returns whether it succeeded.
bool prepare_read_rows();
// Must be called while ggml plans a graph, for each node in order. `cuts`: the operation can be computed for some rows only.
void plan_node(const Functions& ggml, Tensor* node, bool cuts);
// Returns the node that this thread planned `distance` nodes before the last one; null if there is none.
Tensor* planned_before(int distance);
// Must be called by the thread that planned a graph, with each operation that it computes. The next planned node then begins another graph.
void end_plan();
Restriction restriction_of(const Tensor& op);
// Whether one of ggml's own operations can be computed for some rows only.
bool is_row_by_row(const Tensor& op);
// Returns how many rows of products have been skipped so far, in all graphs.
int64_t unread_rows();

}  // namespace edge::ggml
