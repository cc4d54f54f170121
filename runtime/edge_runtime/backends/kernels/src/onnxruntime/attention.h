// Attention of all K/V heads in the session's threads.
#pragma once
#include "onnxruntime/abi.h"
#include "variants.h"

namespace edge {

// Head number g has the arrays of `first`, g times the strides (in floats) further on.
struct AllHeads {
    Attention first;
    int64_t heads, query_stride, past_stride, new_stride;
};

// out [fresh - skipped, heads, queries of a head, dim]. Work is divided by spans of positions, so that keys are read once, or, where there are many
// queries, by queries; the numbers are the same.
ort::Status* attend_all(ort::Table api, ort::KernelContext* context, const Attend& attend, const AllHeads& all, float* out);

}  // namespace edge
