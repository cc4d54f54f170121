// Rows that nobody reads are not computed.
//
// llama.cpp takes the rows whose logits were asked for (`out_ids`) out of a batch in the last layer. Behind the last layer that owns K/V rows
// depend on nothing but themselves, so that all others were computed for nobody: Gemma 4's E2B has 20 such layers of 35.
//
// ggml asks about every node of a graph, in order, before it computes: they are collected. When the logits come, the graph is walked from
// there to its beginning. A node whose rows go nowhere but into that choice of rows gets a mark in `extra`, which ggml's CPU backend leaves
// to buffer types, and is computed for these rows alone. Any other reader, be it an operation that this file does not have, makes it compute
// all rows as before: no operation takes in a row that was not computed. A graph without such nodes, as of a llama.cpp that leaves them
// out itself, gets no mark.
#pragma once
#include "facts.h"

namespace edge::ggml {

constexpr int kMaxRuns = 32;  // of rows beside each other; with more of them all rows are computed

// The rows of a batch that are read.
struct ReadRows {
    struct Run {
        int64_t first, count;
    };
    int64_t batch;
    int count;
    Run runs[kMaxRuns];
};

// An operation and its sources, cut to a run of rows. Lies in one place: the operation points to its sources.
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

// Which rows of an operation are computed; no `rows`: all.
struct Restriction {
    const ReadRows* rows;
    int dimension;
};

// To be called once, before the others. Returns whether it succeeded.
bool prepare_read_rows();
// Called where ggml plans a graph, for each of its nodes in order. `cuts` says that an operation can be computed for some rows.
void plan_node(const Functions& ggml, Tensor* node, bool cuts);
// A node of this thread's plan, so many before the last one; null where there is none.
Tensor* planned_before(int distance);
// Called by the thread that planned a graph, with each operation it computes: the next planned node begins another graph.
void end_plan();
Restriction restriction_of(const Tensor& op);
// Whether ggml's own operation can be cut to some rows.
bool is_row_by_row(const Tensor& op);
// Rows of products that were left out so far, of all graphs.
int64_t unread_rows();

}  // namespace edge::ggml
