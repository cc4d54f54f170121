#include "variants.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif

namespace edge {

int64_t bytes_ahead = kAhead;

namespace {

constexpr int kMaxVariants = 4;

#if defined(__x86_64__)
// Returns which registers the operating system saves at a context switch; others cannot be used.
unsigned saved_state() {
    unsigned low, high;
    asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

bool is_zen5() {
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx || !__get_cpuid(1, &a, &b, &c, &d)) return false;
    return (a >> 8 & 15) + (a >> 20 & 255) == 0x1a;
}

void list_usable(const Variant** end) {
    if (is_zen5()) bytes_ahead = kFarAhead;
    unsigned a, b, c, d, ebx7 = 0, ecx7 = 0, eax71 = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool xsave = c & 1u << 27, fma = c & 1u << 12, f16c = c & 1u << 29;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) ebx7 = b, ecx7 = c;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) eax71 = a;
    const unsigned state = xsave ? saved_state() : 0;
    const bool avx2 = (state & 6) == 6 && fma && f16c && ebx7 & 1u << 5;
    const unsigned foundation = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
    if (avx2 && (state & 0xe6) == 0xe6 && (ebx7 & foundation) == foundation && ecx7 & 1u << 11) *end++ = &kAvx512Vnni;
    if (avx2 && eax71 & 1u << 4) *end++ = &kAvxVnni;
    if (avx2) *end++ = &kAvx2;
}
#else
bool has(const char* apple, unsigned long kind, unsigned bit) {
#if defined(__APPLE__)
    int value = 0;
    size_t size = sizeof value;
    (void)kind, (void)bit;
    return sysctlbyname(apple, &value, &size, nullptr, 0) == 0 && value;
#else
    (void)apple;
    return getauxval(kind) >> bit & 1;
#endif
}

void list_usable(const Variant** end) {
    const bool dotprod = has("hw.optional.arm.FEAT_DotProd", 16, 20);
    if (dotprod && has("hw.optional.arm.FEAT_I8MM", 26, 13)) *end++ = &kI8mm;
    if (dotprod) *end++ = &kDotprod;
    *end++ = &kNeon;
}
#endif

struct UsableVariants {
    const Variant* variants[kMaxVariants] = {};
    UsableVariants() { list_usable(variants); }  // runs when the library is loaded
};

}  // namespace

static const UsableVariants usable;

const Variant* const* usable_variants() { return usable.variants; }

const Variant* chosen_variant() {
    const char* requested = getenv("EDGE_MTP_KERNELS");
    const Variant* const* usable = usable_variants();
    if (!requested || !*requested) return usable[0];
    for (; *usable; usable++)
        if (strcmp(requested, (*usable)->name) == 0) return *usable;
    return nullptr;
}

}  // namespace edge
