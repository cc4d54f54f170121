// Once weights are packed, their source need not stay in memory too.
#pragma once
#include <stddef.h>

namespace edge {

// Releases the pages of these bytes. They stay readable, from their file or from the swap space. Pages of a file are released by this process
// only. If they were paged out, they would leave the system's cache too, and the next start would wait for the disk.
void give_back(const void* data, size_t bytes);
// The same for pages of a file; does nothing with other memory, which may soon be written again.
void give_back_file(const void* data, size_t bytes);

}  // namespace edge
