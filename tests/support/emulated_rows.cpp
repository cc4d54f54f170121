// Runs the row kernels on an emulated processor, without Python and without a C library: compiling one takes minutes. Standard input is a
// series of calls: the function's name, the variant's, its numbers, the bytes of its arrays and of its result, the arrays. Standard output
// is the results; a call that fails ends it.
#include <stddef.h>
#include <stdint.h>

// Weights are packed into memory here: files of packed weights need a C library.
namespace edge {
struct PackedMatrix;
struct PackedFile {
    void* pages(size_t) const;
    bool take(const char*, PackedMatrix&, void*);
    bool add(const char*, const PackedMatrix&);
};
void* PackedFile::pages(size_t) const { return nullptr; }
bool PackedFile::take(const char*, PackedMatrix&, void*) { return false; }
bool PackedFile::add(const char*, const PackedMatrix&) { return false; }
PackedFile* packed_file() { return nullptr; }
void unmap(PackedMatrix&) {}
}  // namespace edge

extern "C" {
int edge_rows_multiply(const char*, int64_t, int64_t, int, int, const void*, const void*, const void*, int64_t, void*);
int edge_rows_multiply_static(const char*, const void*, const void*, const void*, const void*, int64_t, int64_t, int64_t, int64_t, int64_t, void*);
int edge_rows_multiply_gguf(const char*, int, int64_t, int64_t, size_t, const void*, const void*, int64_t, void*);
int edge_rows_multiply_floats(const char*, const void*, const void*, int64_t, int64_t, int64_t, int64_t, void*);
int edge_rows_gate(const char*, const void*, const void*, int64_t, void*);
int edge_rows_tanh(const char*, const void*, int64_t, void*);
int edge_rows_norm(const char*, const void*, const void*, const void*, int64_t, void*);
int edge_rows_attend(const char*, const void*, const void*, const void*, const void*, const void*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                     int64_t, void*);
int edge_rows_attend_cells(const char*, const void*, const void*, const void*, const void*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                           void*);

void* edge_draft_new(const char*, const void*, const char**);
const char* edge_draft_run(void*, void*);

// What the kernels want of a C library. Memory is given back after each call.
alignas(64) static uint8_t memory[64 << 20];
static size_t used;
static const uint64_t* auxiliary;

void* aligned_alloc(size_t alignment, size_t size) {
    const size_t at = (used + alignment - 1) / alignment * alignment;
    if (size > sizeof memory - at) return nullptr;
    used = at + size;
    return memory + at;
}
int posix_memalign(void** memory_of, size_t alignment, size_t size) {
    *memory_of = aligned_alloc(alignment, size);
    return *memory_of ? 0 : 12;
}
int madvise(void*, size_t, int) { return 0; }
long sysconf(int) { return 1; }
int pthread_create(unsigned long*, const void*, void* (*)(void*), void*) { return 11; }
int pthread_join(unsigned long, void**) { return 3; }
int pthread_mutex_init(void*, const void*) { return 0; }
int pthread_mutex_lock(void*) { return 0; }
int pthread_mutex_trylock(void*) { return 0; }
int pthread_mutex_unlock(void*) { return 0; }
int pthread_mutex_destroy(void*) { return 0; }
int pthread_cond_init(void*, const void*) { return 0; }
int pthread_cond_wait(void*, void*) { return 0; }
int pthread_cond_signal(void*) { return 0; }
int pthread_cond_destroy(void*) { return 0; }
int sched_yield() { return 0; }
int getpid() { return 1; }
void* malloc(size_t size) { return aligned_alloc(64, size); }
void free(void*) {}
void* memset(void* to, int value, size_t size) {
    for (size_t i = 0; i < size; i++) static_cast<volatile uint8_t*>(to)[i] = static_cast<uint8_t>(value);
    return to;
}
void* memcpy(void* to, const void* from, size_t size) {
    for (size_t i = 0; i < size; i++) static_cast<volatile uint8_t*>(to)[i] = static_cast<const uint8_t*>(from)[i];
    return to;
}
size_t strlen(const char* text) {
    size_t size = 0;
    while (text[size]) size++;
    return size;
}
int strcmp(const char* one, const char* other) {
    while (*one && *one == *other) one++, other++;
    return *one - *other;
}
char* getenv(const char*) { return nullptr; }
unsigned long getauxval(unsigned long kind) {
    for (const uint64_t* entry = auxiliary; entry[0]; entry += 2)
        if (entry[0] == kind) return entry[1];
    return 0;
}
}

namespace {

constexpr int64_t kRead = 63, kWrite = 64, kExit = 93;
constexpr int kArrays = 6;  // the last one is the result

int64_t call_system(int64_t number, int64_t first, const void* data = nullptr, size_t size = 0) {
    register int64_t x8 asm("x8") = number, x0 asm("x0") = first;
    register const void* x1 asm("x1") = data;
    register size_t x2 asm("x2") = size;
    asm volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
    return x0;
}

bool all(int64_t number, int64_t file, void* data, size_t size) {
    for (size_t done = 0; done < size;) {
        const int64_t some = call_system(number, file, static_cast<uint8_t*>(data) + done, size - done);
        if (some <= 0) return false;
        done += static_cast<size_t>(some);
    }
    return true;
}

struct Call {
    char function[16], variant[16];
    int64_t numbers[8], sizes[kArrays];
};

// A draft as row_calls.py lays it out in one piece: addresses in it count from its beginning, and a list says where they stand. The drafter's
// description begins it, n[0] bytes on is the call, and at n[1] and n[2] what it gives: probabilities are the result.
int run_draft(const Call& call, void* const (&a)[kArrays]) {
    const int64_t* n = call.numbers;
    char* piece = static_cast<char*>(a[0]);
    const int64_t* places = static_cast<const int64_t*>(a[1]);
    for (int64_t i = 0; i < n[3]; i++) {
        int64_t at;
        memcpy(&at, piece + places[i], 8);
        at += reinterpret_cast<int64_t>(piece);
        memcpy(piece + places[i], &at, 8);
    }
    const char* reason = nullptr;
    void* model = edge_draft_new(call.variant, piece, &reason);
    if (!model || edge_draft_run(model, piece + n[0])) return 1;
    float* out = static_cast<float*>(a[kArrays - 1]);
    for (int64_t i = 0; i < n[4]; i++) {
        int64_t token;
        memcpy(&token, piece + n[1] + 8 * i, 8);
        out[i] = static_cast<float>(token);
        memcpy(out + n[4] + i, piece + n[2] + 4 * i, 4);
    }
    return 0;
}

int run(const Call& call, void* const (&a)[kArrays]) {
    const int64_t* n = call.numbers;
    void* out = a[kArrays - 1];
    if (!strcmp(call.function, "multiply"))
        return edge_rows_multiply(call.variant, n[0], n[1], static_cast<int>(n[2]), static_cast<int>(n[3]), a[0], a[1], a[2], n[4], out);
    if (!strcmp(call.function, "multiply_static")) return edge_rows_multiply_static(call.variant, a[0], a[1], a[2], a[3], n[0], n[1], n[2], n[3], n[4], out);
    if (!strcmp(call.function, "multiply_gguf"))
        return edge_rows_multiply_gguf(call.variant, static_cast<int>(n[0]), n[1], n[2], static_cast<size_t>(n[3]), a[0], a[1], n[4], out);
    if (!strcmp(call.function, "attend_cells"))
        return edge_rows_attend_cells(call.variant, a[0], a[1], a[2], a[3], n[0], n[1], n[2], n[3], n[4], n[5], n[6], out);
    if (!strcmp(call.function, "multiply_floats")) return edge_rows_multiply_floats(call.variant, a[0], a[1], n[0], n[1], n[2], n[3], out);
    if (!strcmp(call.function, "draft")) return run_draft(call, a);
    if (!strcmp(call.function, "gate")) return edge_rows_gate(call.variant, a[0], a[1], n[0], out);
    if (!strcmp(call.function, "norm")) return edge_rows_norm(call.variant, a[0], a[1], a[2], n[0], out);
    if (!strcmp(call.function, "tanh")) return edge_rows_tanh(call.variant, a[0], n[0], out);
    return edge_rows_attend(call.variant, a[0], a[1], a[2], a[3], a[4], n[0], n[1], n[2], n[3], n[4], n[5], n[6], out);
}

int run_all() {
    for (Call call; all(kRead, 0, &call, sizeof call); used = 0) {
        void* arrays[kArrays];
        for (int i = 0; i < kArrays; i++) {
            arrays[i] = malloc(static_cast<size_t>(call.sizes[i]));
            if (!arrays[i] || (i < kArrays - 1 && !all(kRead, 0, arrays[i], static_cast<size_t>(call.sizes[i])))) return 1;
        }
        if (run(call, arrays) || !all(kWrite, 1, arrays[kArrays - 1], static_cast<size_t>(call.sizes[kArrays - 1]))) return 2;
    }
    return 0;
}

}  // namespace

extern "C" {
using Constructor = void (*)();
extern const Constructor __init_array_start[], __init_array_end[];

[[noreturn]] void begin(const uint64_t* stack) {
    const uint64_t* at = stack + 1 + stack[0] + 1;  // behind the arguments
    while (*at) at++;                               // behind the environment
    auxiliary = at + 1;
    for (const Constructor* one = __init_array_start; one != __init_array_end; one++) (*one)();
    call_system(kExit, run_all());
    __builtin_unreachable();
}
}

asm(".globl _start\n_start:\nmov x29, xzr\nmov x0, sp\nbl begin\n");
