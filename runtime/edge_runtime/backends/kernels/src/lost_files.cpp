// What happens if the file of a mapping is lost.
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "export.h"

static const char* lost_file = nullptr;

static void end_on_lost_file(int) {
    const ssize_t written = write(STDERR_FILENO, lost_file, strlen(lost_file));
    _exit(written < 0 ? 2 : 1);
}

// If a mapped file was truncated or its disk failed, a read raises SIGBUS. Makes the process then print `line`, whose memory the caller keeps, and
// exit with code 1. An existing handler is not replaced. Returns 0, or 1 if nothing was changed.
EDGE_EXPORT int edge_end_on_lost_file(const char* line) {
    struct sigaction now = {};
    if (sigaction(SIGBUS, nullptr, &now) || now.sa_handler != SIG_DFL) return 1;
    lost_file = line;
    struct sigaction ours = {};
    ours.sa_handler = end_on_lost_file;
    return sigaction(SIGBUS, &ours, nullptr) ? 1 : 0;
}
