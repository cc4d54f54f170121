// Marks a function that the library exports; all others are hidden.
#pragma once

#define EDGE_EXPORT extern "C" __attribute__((visibility("default")))
