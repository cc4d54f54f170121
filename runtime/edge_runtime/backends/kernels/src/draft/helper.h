// A second thread of a drafter. Both threads take pieces of a job, so the drafting thread waits only for a piece that the helper has begun.
#pragma once
#include <stdint.h>

namespace edge {

struct Helper;

// Returns null if no thread can be started.
Helper* start_helper();
void stop_helper(Helper* helper);
// Between these two calls the helper polls for pieces; otherwise it sleeps.
void wake_helper(Helper* helper);
void rest_helper(Helper* helper);
// How many pieces it has run since it started. Only the thread that calls run_pieces may call it.
int64_t helped_pieces(const Helper* helper);
// Runs all pieces of a job; without a helper, in this thread alone.
void run_pieces(Helper* helper, int64_t pieces, void (*run)(const void* job, int64_t piece), const void* job);

template <class Piece>
void each_piece(Helper* helper, int64_t pieces, const Piece& piece) {
    run_pieces(helper, pieces, [](const void* job, int64_t number) { (*static_cast<const Piece*>(job))(number); }, &piece);
}

}  // namespace edge
