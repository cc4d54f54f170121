// The compiled variants, and the choice among them by the processor's instruction sets.
#pragma once
#include "layout.h"

namespace edge {

// How many bytes ahead of their use AVX-512 prefetches weights into the first level cache. On a Zen 5 this is as far as into the second level cache:
// a second prefetch of weights that are in the second level cache made one row up to a quarter slower.
extern int64_t bytes_ahead;

extern const Variant kAvx512Vnni, kAvxVnni, kAvx2, kNeon, kDotprod, kI8mm;

// Returns the variants that this processor can run, best first; the list ends with a null pointer.
const Variant* const* usable_variants();
// Returns the variant that EDGE_MTP_KERNELS names, or else the best one; null if there is none, or if the variable is "none".
const Variant* chosen_variant();

}  // namespace edge
