#include "source_pages.h"

#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

namespace edge {

#if defined(__linux__) && defined(MADV_PAGEOUT) && defined(MADV_WIPEONFORK)
namespace {

// Whether these pages are mapped from a file. The test: only private memory without a file accepts MADV_WIPEONFORK, which is undone at once.
bool are_of_a_file(void* begin, size_t bytes) {
    if (madvise(begin, bytes, MADV_COLD)) return false;  // an old kernel, which may not know MADV_WIPEONFORK
    if (madvise(begin, bytes, MADV_WIPEONFORK)) return errno == EINVAL;
    madvise(begin, bytes, MADV_KEEPONFORK);
    return false;
}

void give_back(const void* data, size_t bytes, bool other_memory) {
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) & ~(page - 1);
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(page - 1);
    if (begin >= end) return;
    void* memory = reinterpret_cast<void*>(begin);
    if (are_of_a_file(memory, end - begin)) madvise(memory, end - begin, MADV_DONTNEED);
    else if (other_memory) madvise(memory, end - begin, MADV_PAGEOUT);
}

}  // namespace
#else
static void give_back(const void*, size_t, bool) {}
#endif

void give_back(const void* data, size_t bytes) { give_back(data, bytes, true); }
void give_back_file(const void* data, size_t bytes) { give_back(data, bytes, false); }

}  // namespace edge
