// Attention of all K/V heads in the session's threads.
#pragma once
#include "onnxruntime/abi.h"
#include "variants.h"

namespace edge {

// The arrays of head g are those of `first`, moved by g times the strides (in floats).
struct AllHeads {
    Attention first;
    int64_t heads, query_stride, past_stride, new_stride;
};

// Computes out [fresh - skipped, heads, queries of a head, dim]. Work is divided by spans of positions, so that keys are read once; or by queries, if
// there are many. The results are the same.
ort::Status* attend_all(ort::Table api, ort::KernelContext* context, const Attend& attend, const AllHeads& all, float* out);

}  // namespace edge
