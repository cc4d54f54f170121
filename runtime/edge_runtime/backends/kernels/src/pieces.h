// How a product's outputs are cut for threads that take pieces in turn.
#pragma once
#include "layout.h"

namespace edge {

constexpr int64_t kMaxPieceBytes = int64_t{1} << 17;  // some us of reading: taking a piece costs a few percent of one

// How many of `count` parts, each with so many bytes of weights, are a piece: many pieces, so that no thread waits long for another's last one,
// but none smaller than it has to be.
inline int64_t parts_of_piece(int64_t count, int64_t bytes) {
    constexpr int64_t kPieces = 64;
    const int64_t limit = kMaxPieceBytes / bytes, share = count / kPieces < limit ? count / kPieces : limit;
    return share > 1 ? share : 1;
}

// The same in tiles, of which a kernel takes half a group at least.
inline int64_t tiles_of_piece(const PackedMatrix& m) {
    constexpr int64_t kHalf = kTilesAtOnce / 2;
    return kHalf * parts_of_piece(m.tiles() / kHalf, kHalf * m.tile_bytes());
}

}  // namespace edge
