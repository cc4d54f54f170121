// Records which cells of llama.cpp's KV cache the rows of a forward attend to, and their addresses, because a draft reads the same cells.
//
// llama.cpp has no interface for that, but its attention gets both: an address, and a mask for each row. A target with a drafter has a CellWatch,
// which records them during a forward, for two layers and for the flagged rows.
#pragma once
#include "draft/model.h"
#include "facts.h"

namespace edge::ggml {

struct CellWatch;

// Must be called once, before the other functions. Returns whether it succeeded.
bool prepare_watches();
// Must be called by the first thread of each attention: with the operation for all rows of a forward, and the part that is computed now.
void watch_attention(const Tensor& whole, const Tensor& part);

}  // namespace edge::ggml
