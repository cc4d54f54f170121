// What weights were packed from need not stay in memory beside what was made of them.
#pragma once
#include <stddef.h>

namespace edge {

// Gives the system the pages between these bytes back. They stay readable, from their file or from where the system put them. Pages of a
// file are let go by this process alone: paged out, they would leave the system's cache too, and the next start would wait for the disk.
void give_back(const void* data, size_t bytes);
// The same where the pages are a file's, and nothing where they are not: such memory may be about to be written anew.
void give_back_file(const void* data, size_t bytes);

}  // namespace edge
