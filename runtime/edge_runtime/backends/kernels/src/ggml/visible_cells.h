// Which cells of llama.cpp's memory the rows of a forward attend to, and where these cells lie: a draft reads the same ones.
//
// Nothing of llama.cpp says it, but its attention gets both: an address, and a mask for each row. A target that drafts has a CellWatch, which keeps
// them of two of its layers during a forward, for the rows that are flagged.
#pragma once
#include "draft/model.h"
#include "facts.h"

namespace edge::ggml {

struct CellWatch;

// To be called once, before the others. Returns whether it succeeded.
bool prepare_watches();
// Called by the first thread with attention of all rows of a forward, and with its part for some of them.
void watch_attention(const Tensor& whole, const Tensor& part);

}  // namespace edge::ggml
