// The variants that were compiled in, and the choice among them by what the processor has.
#pragma once
#include "layout.h"

namespace edge {

// How far ahead of their use AVX-512 fetches weights into the nearest cache. A Zen 5 has to fetch them there once and for all: a second fetch, when
// they are in the next cache already, made one row up to a quarter slower.
extern int64_t bytes_ahead;

extern const Variant kAvx512Vnni, kAvxVnni, kAvx2, kNeon, kDotprod, kI8mm;

// The variants this processor can run, best first; ends with a null pointer.
const Variant* const* usable_variants();
// The one named by EDGE_MTP_KERNELS, or else the best; null where there is none, or that says "none".
const Variant* chosen_variant();

}  // namespace edge
