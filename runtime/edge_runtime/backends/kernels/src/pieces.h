// How the outputs of a product are cut into pieces, which threads take one by one.
#pragma once
#include "layout.h"

namespace edge {

constexpr int64_t kMaxPieceBytes = int64_t{1} << 17;  // takes some us to read; taking a piece costs a few percent of that

// Returns how many of `count` parts, each with `bytes` bytes of weights, make a piece. There are many pieces, so that no thread waits long for
// another's last one, but not more than necessary.
inline int64_t parts_of_piece(int64_t count, int64_t bytes) {
    constexpr int64_t kPieces = 64;
    const int64_t limit = kMaxPieceBytes / bytes, share = count / kPieces < limit ? count / kPieces : limit;
    return share > 1 ? share : 1;
}

// The same in tiles; a piece has at least as many tiles as a kernel multiplies at once, half a group.
inline int64_t tiles_of_piece(const PackedMatrix& m) {
    constexpr int64_t kHalf = kTilesAtOnce / 2;
    return kHalf * parts_of_piece(m.tiles() / kHalf, kHalf * m.tile_bytes());
}

}  // namespace edge
