#include "draft/helper.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "layout.h"

namespace edge {

namespace {

// How often a helper polls without finding a piece before it yields the processor (some 10 us), and how often it yields before it sleeps (some ms).
constexpr int kLooks = 256, kYields = 256;
constexpr uint64_t kPieces = uint64_t{1} << 32, kNoPiece = kPieces - 1;  // more pieces than any job has

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

template <class Type>
Type read(const Type* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
template <class Type>
void write(Type* to, Type value) { __atomic_store_n(to, value, __ATOMIC_RELAXED); }

}  // namespace

struct Helper {
    // The job's number times kPieces, plus the number of its next piece, or plus kNoPiece once the job is over, so that no piece can be taken.
    alignas(kLine) uint64_t next;
    uint64_t pieces;
    void (*run)(const void*, int64_t);
    const void* job;
    alignas(kLine) uint64_t done;  // pieces of this job that the helper has finished
    alignas(kLine) bool awake, over;
    pthread_mutex_t lock;
    pthread_cond_t wakes;
    pthread_t thread;
    pid_t process;  // the process that started the thread; a forked one does not have it
    uint64_t helped;  // pieces that the helper ran in all finished jobs
};

namespace {

// Runs pieces of the current job; returns whether it ran any. `run` and `job` are read before a piece is taken, so they may belong to the next
// job already. Then no piece is taken: either `pieces` is still the old job's, all of which were taken; or it is the new job's, and whoever
// reads that also sees that the old job is over, so the exchange fails.
bool help(Helper& h) {
    uint64_t next = __atomic_load_n(&h.next, __ATOMIC_ACQUIRE);
    bool helped = false;
    for (;;) {
        const auto run = read(&h.run);
        const void* const job = read(&h.job);
        const uint64_t piece = next % kPieces;
        if (piece >= __atomic_load_n(&h.pieces, __ATOMIC_ACQUIRE)) return helped;
        if (!__atomic_compare_exchange_n(&h.next, &next, next + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) continue;
        run(job, static_cast<int64_t>(piece));
        helped = true;
        __atomic_fetch_add(&h.done, uint64_t{1}, __ATOMIC_RELEASE);
        next = __atomic_load_n(&h.next, __ATOMIC_ACQUIRE);
    }
}

void sleep_until_woken(Helper& h) {
    pthread_mutex_lock(&h.lock);
    while (!read(&h.awake) && !read(&h.over)) pthread_cond_wait(&h.wakes, &h.lock);
    pthread_mutex_unlock(&h.lock);
}

void* live(void* data) {
    Helper& h = *static_cast<Helper*>(data);
    while (!read(&h.over)) {
        sleep_until_woken(h);
        for (int found_none = 0; read(&h.awake) && found_none < kLooks * kYields; found_none++) {
            if (help(h)) found_none = 0;
            else if (found_none % kLooks == kLooks - 1) sched_yield();
            pause_briefly();
        }
        write(&h.awake, false);
    }
    return nullptr;
}

}  // namespace

Helper* start_helper() {
    Helper* h = static_cast<Helper*>(aligned_alloc(kLine, (sizeof(Helper) + kLine - 1) / kLine * kLine));
    if (!h) return nullptr;
    *h = {};
    h->next = kNoPiece, h->process = getpid();
    pthread_mutex_init(&h->lock, nullptr);
    pthread_cond_init(&h->wakes, nullptr);
    if (pthread_create(&h->thread, nullptr, live, h)) {
        free(h);
        return nullptr;
    }
    return h;
}

void stop_helper(Helper* h) {
    if (!h || h->process != getpid()) return;
    pthread_mutex_lock(&h->lock);
    write(&h->over, true);
    write(&h->awake, false);
    pthread_cond_signal(&h->wakes);
    pthread_mutex_unlock(&h->lock);
    pthread_join(h->thread, nullptr);
    pthread_cond_destroy(&h->wakes);
    pthread_mutex_destroy(&h->lock);
    free(h);
}

void wake_helper(Helper* h) {
    // If the helper is just falling asleep or waking up, the lock is taken; then it does not help with this draft, which is never wrong.
    if (!h || h->process != getpid() || pthread_mutex_trylock(&h->lock)) return;
    write(&h->awake, true);
    pthread_cond_signal(&h->wakes);
    pthread_mutex_unlock(&h->lock);
}

void rest_helper(Helper* h) {
    if (h) write(&h->awake, false);
}

int64_t helped_pieces(const Helper* h) { return h ? static_cast<int64_t>(h->helped) : 0; }

void run_pieces(Helper* h, int64_t pieces, void (*run)(const void*, int64_t), const void* job) {
    if (!h || pieces < 2) {
        for (int64_t piece = 0; piece < pieces; piece++) run(job, piece);
        return;
    }
    const uint64_t count = static_cast<uint64_t>(pieces), number = read(&h->next) / kPieces + 1;
    write(&h->run, run), write(&h->job, job), write(&h->done, uint64_t{0});
    __atomic_store_n(&h->pieces, count, __ATOMIC_RELEASE);
    __atomic_store_n(&h->next, number * kPieces, __ATOMIC_RELEASE);
    uint64_t own = 0;
    for (;; own++) {
        const uint64_t piece = __atomic_fetch_add(&h->next, uint64_t{1}, __ATOMIC_ACQ_REL) % kPieces;
        if (piece >= count) break;
        run(job, static_cast<int64_t>(piece));
    }
    __atomic_store_n(&h->next, number * kPieces + kNoPiece, __ATOMIC_RELEASE);
    for (int looks = 0; __atomic_load_n(&h->done, __ATOMIC_ACQUIRE) + own < count; looks++) {
        if (looks % kLooks == kLooks - 1) sched_yield();
        pause_briefly();
    }
    h->helped += count - own;
}

}  // namespace edge
