// What the library does where the file behind a mapping is lost. The only part that needs an operating system's C library.
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "export.h"

static const char* lost_file = nullptr;

static void end_on_lost_file(int) {
    const ssize_t written = write(STDERR_FILENO, lost_file, strlen(lost_file));
    _exit(written < 0 ? 2 : 1);
}

// Has a read of a mapped file that is no longer there (SIGBUS: it was cut, or its disk failed) end the process with this line, which stays
// the caller's, and exit code 1. A handler that is there already stays. Returns 0, or 1 where nothing was changed.
EDGE_EXPORT int edge_end_on_lost_file(const char* line) {
    struct sigaction now = {};
    if (sigaction(SIGBUS, nullptr, &now) || now.sa_handler != SIG_DFL) return 1;
    lost_file = line;
    struct sigaction ours = {};
    ours.sa_handler = end_on_lost_file;
    return sigaction(SIGBUS, &ours, nullptr) ? 1 : 0;
}
