// A second thread of a drafter: both take pieces of what is to be done, and whoever drafts waits only for a piece that the other has begun.
#pragma once
#include <stdint.h>

namespace edge {

struct Helper;

// Null where no thread is to be had.
Helper* start_helper();
void stop_helper(Helper* helper);
// Between the two it looks for pieces all the time, otherwise it sleeps.
void wake_helper(Helper* helper);
void rest_helper(Helper* helper);
// How many pieces it has run since it started. For whoever calls run_pieces.
int64_t helped_pieces(const Helper* helper);
// Runs all pieces; in this thread alone without a helper.
void run_pieces(Helper* helper, int64_t pieces, void (*run)(const void* job, int64_t piece), const void* job);

template <class Piece>
void each_piece(Helper* helper, int64_t pieces, const Piece& piece) {
    run_pieces(helper, pieces, [](const void* job, int64_t number) { (*static_cast<const Piece*>(job))(number); }, &piece);
}

}  // namespace edge
