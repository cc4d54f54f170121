// An extra buffer type for ggml's CPU backend. It packs weights when they are loaded, and computes products with them, attention and elementwise
// functions. The backend asks the buffer types in its list first about every operation.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "attention.h"
#include "elementwise.h"
#include "export.h"
#include "feed_forward.h"
#include "multiply.h"
#include "pack.h"
#include "packed_file.h"
#include "read_rows.h"
#include "source_pages.h"
#include "visible_cells.h"
#include "weights.h"

namespace edge::ggml {
namespace {

Functions functions;
const Variant* variant = nullptr;
bool enabled = false;

// A buffer's memory: from the heap; or, with a packed file, reserved pages over which tensors are mapped.
struct Memory {
    void *base, *pages;
    size_t reserved;  // bytes of the reserved pages; 0: the memory is from the heap
};

Memory& memory_of(Buffer* buffer) { return *static_cast<Memory*>(buffer->context); }

void free_memory(Memory* memory) {
    if (memory->reserved) munmap(memory->pages, memory->reserved);
    else free(memory->base);
    free(memory);
}

void release(Buffer* buffer) { free_memory(&memory_of(buffer)); }
void* base(Buffer* buffer) { return memory_of(buffer).base; }

[[noreturn]] void end(const char* tensor, const char* what) {
    fprintf(stderr, "edge-mtp: %s %s\n", tensor, what);
    abort();
}

void clear(Buffer* buffer, uint8_t value) {
    const Memory& memory = memory_of(buffer);
    if (memory.reserved && mprotect(memory.pages, memory.reserved, PROT_READ | PROT_WRITE)) end("weights", "cannot be written");
    memset(memory.base, value, buffer->size);
}

// Maps packed weights from the file; or packs them into the reserved pages and adds them to the file, if there is one.
void set_reserved(Tensor* tensor, const void* data, size_t size) {
    PackedFile* file = packed_file();
    PackedMatrix m = packed_matrix(*tensor);
    if (file && file->take(tensor->name, m, tensor->data)) return;
    if (mprotect(tensor->data, mapped_bytes(packed_bytes(*tensor)), PROT_READ | PROT_WRITE)) end(tensor->name, "has no memory");
    pack_weights(*tensor, data, tensor->data);
    if (file) file->add(tensor->name, m);
    give_back_file(data, size);
}

// Accepts whole tensors only, as llama.cpp's loader sets them. Anything else is an error in the program, not in a file.
void set_tensor(Buffer* buffer, Tensor* tensor, const void* data, size_t offset, size_t size) {
    const Memory& memory = memory_of(buffer);
    const char *begin = static_cast<const char*>(memory.base), *at = static_cast<const char*>(tensor->data);
    const bool whole = offset == 0 && packs(*tensor) && size == functions.tensor_bytes(tensor);
    const size_t left = at < begin || at > begin + buffer->size ? 0 : static_cast<size_t>(begin + buffer->size - at);
    if (!whole || left < packed_bytes(*tensor)) end(tensor->name, "cannot be set in part or beyond its buffer");
    if (memory.reserved) return set_reserved(tensor, data, size);
    pack_weights(*tensor, data, tensor->data);
    give_back_file(data, size);  // it is not read again, unless another tensor shares these bytes
}

const char* type_name(BufferType*) { return "EDGE_MTP"; }
// Mapped tensors begin at a page.
size_t alignment(BufferType*) { return packed_file() ? kPackedAlignment : kAlignment; }

// Allocates or reserves `size` bytes; null if that fails.
Memory* reserve(size_t size) {
    Memory* memory = static_cast<Memory*>(calloc(1, sizeof(Memory)));
    if (!memory) return nullptr;
    if (packed_file()) {
        memory->reserved = mapped_bytes(size) + kLargePage;
        memory->pages = mmap(nullptr, memory->reserved, PROT_NONE, MAP_PRIVATE | MAP_ANON, -1, 0);
        const uintptr_t from = reinterpret_cast<uintptr_t>(memory->pages);
        memory->base = reinterpret_cast<void*>((from + kLargePage - 1) / kLargePage * kLargePage);
        if (memory->pages != MAP_FAILED) return memory;
    } else if ((memory->base = memory_for_weights(size))) {
        return memory;
    }
    free(memory);
    return nullptr;
}

Buffer* allocate(BufferType* type, size_t size) {
    if (size > SIZE_MAX - (size_t{1} << 20)) return nullptr;
    Memory* memory = reserve(size + kAlignment);
    if (!memory) return nullptr;
    BufferCalls calls = {};
    calls.release = release;
    calls.base = base;
    calls.set_tensor = set_tensor;
    calls.clear = clear;
    Buffer* buffer = functions.buffer_init(type, calls, memory, size);
    if (!buffer) free_memory(memory);
    return buffer;
}

size_t tensor_size(BufferType*, const Tensor* tensor) {
    const size_t stock = functions.tensor_bytes(tensor), packed = packs(*tensor) ? packed_bytes(*tensor) : 0;
    return packed > stock ? packed : stock;
}

bool is_ours(const Tensor* tensor);

bool failed = false;

// Called if there is too little work memory: sets the result of the operation to NaN and ends the graph after it. ggml has no other way to fail.
void fail(const Work& work, const Tensor& op) {
    if (work.thread != 0) return;
    for (int64_t row = 0; row < op.ne[1] * op.ne[2] * op.ne[3]; row++) {
        const size_t at = static_cast<size_t>(row % op.ne[1]) * op.nb[1] + static_cast<size_t>(row / op.ne[1] % op.ne[2]) * op.nb[2] +
                          static_cast<size_t>(row / op.ne[1] / op.ne[2]) * op.nb[3];
        float* values = reinterpret_cast<float*>(static_cast<char*>(op.data) + at);
        for (int64_t i = 0; i < op.ne[0]; i++) values[i] = __builtin_nanf("");
    }
    __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
}

// Runs an operation, or only its rows that are read if it is marked (read_rows.h). `shared`: the threads of one run share memory or a counter that
// the next run uses, so they have to meet in between.
template <class Run>
void run_read_rows(const Work& work, Tensor* op, bool shared, Run run) {
    if (work.thread == 0) end_plan();
    const Restriction restriction = restriction_of(*op);
    if (!restriction.rows) return run(op);
    for (int i = 0; i < restriction.rows->count; i++) {
        if (shared && i) functions.barrier(work.pool);
        CutOperation cut(*op, *restriction.rows, restriction.dimension, restriction.rows->runs[i]);
        run(cut.operation());
    }
}

void plan(const Tensor* op, bool cuts, bool product = false) {
    Tensor* node = const_cast<Tensor*>(op);
    plan_node(functions, node, cuts);
    plan_feed_forward(*node, product, planned_before(1), planned_before(2));
}

struct Multiplication final : Operation {
    bool work_size(int, const Tensor* op, size_t& size) override {
        plan(op, true, true);
        size = multiply_memory(*op);
        return true;
    }
    bool compute(Work* work, Tensor* op) override {
        if (is_left_out(*op)) return true;
        run_read_rows(*work, op, true, [&](Tensor* rows) {
            if (!multiply(functions, *variant, *work, *rows)) fail(*work, *rows);
        });
        return true;
    }
};

struct FloatMultiplication final : Operation {
    bool work_size(int, const Tensor* op, size_t& size) override {
        plan(op, true);
        size = 0;
        return true;
    }
    bool compute(Work* work, Tensor* op) override {
        run_read_rows(*work, op, true, [&](Tensor* rows) { multiply_floats(functions, *variant, *work, *rows); });
        return true;
    }
};

struct Attention final : Operation {
    bool work_size(int threads, const Tensor* op, size_t& size) override {
        plan(op, true);
        size = attention_memory(*op, threads);
        return true;
    }
    bool compute(Work* work, Tensor* op) override {
        run_read_rows(*work, op, true, [&](Tensor* rows) {
            if (work->thread == 0) watch_attention(*op, *rows);
            if (!attend(functions, *variant, *work, *rows)) fail(*work, *rows);
        });
        return true;
    }
};

struct Elementwise final : Operation {
    bool work_size(int, const Tensor* op, size_t& size) override {
        plan(op, true);
        size = joins_products(*op) ? gates_memory(*op) : 0;
        return true;
    }
    bool compute(Work* work, Tensor* op) override {
        if (joins_products(*op)) {
            if (work->thread == 0) end_plan();
            if (!compute_gates(functions, *variant, *work, *op, restriction_of(*op).rows)) fail(*work, *op);
            return true;
        }
        run_read_rows(*work, op, false, [&](Tensor* rows) { compute_elementwise(*variant, *work, *rows); });
        return true;
    }
};

// ggml's own operations. All of them are planned; if one is not marked, ggml computes it.
struct StockOperation final : Operation {
    bool work_size(int, const Tensor* op, size_t&) override {
        plan(op, is_row_by_row(*op));
        return false;
    }
    bool compute(Work* work, Tensor* op) override {
        if (!restriction_of(*op).rows) {
            if (work->thread == 0) end_plan();
            return false;
        }
        run_read_rows(*work, op, false, [&](Tensor* rows) { function_of(*op)(work, rows); });
        return true;
    }

  private:
    static ComputeOperation* function_of(const Tensor& op) {
        switch (op.op) {
            case kAdd: return functions.add;
            case kMul: return functions.mul;
            case kRmsNorm: return functions.rms_norm;
            case kScale: return functions.scale;
            case kContiguous: return functions.contiguous;
            case kRope: return functions.rope;
            case kUnary: return functions.unary;
            default: return functions.hadamard;
        }
    }
};

Multiplication multiplication;
FloatMultiplication float_multiplication;
Attention attention;
Elementwise elementwise;
StockOperation stock_operation;

struct Weights final : ExtraBufferType {
    bool supports(Device*, const Tensor* op) override {
        if (!enabled || !op->src[0] || !is_ours(op->src[0]) || !multiplies(*op)) return false;
        const Buffer* values = op->src[1]->buffer;
        return !values || functions.buffer_type_is_host(values->type);
    }
    Operation* operation(const Tensor* op) override {
        if (op->op == kMulMat && is_ours(op->src[0])) return &multiplication;
        if (!enabled) return nullptr;
        // Weights in a buffer that is not plain memory may have another layout.
        if (multiplies_floats(*op) && functions.buffer_type_is_host(op->src[0]->buffer->type)) return &float_multiplication;
        if (attends(*op)) return &attention;
        if (is_elementwise(*op)) return &elementwise;
        return &stock_operation;
    }
};

Weights weights;
BufferType buffer_type = {{type_name, allocate, alignment, nullptr, tensor_size, nullptr}, nullptr, &weights};

bool is_ours(const Tensor* tensor) { return tensor->buffer && tensor->buffer->type == &buffer_type; }

// When llama.cpp maps a file, it reads all of it ahead, except on NUMA machines. Weights that are in a packed file need not be read. So while a
// packed file is read, llama.cpp is told that this is a NUMA machine. It uses this answer for nothing else, and ggml itself does not ask this way.
constexpr char kSeveralMemories[] = "ggml_backend_cpu_is_numa";
void* (*stock_address)(Registry*, const char*) = nullptr;

bool is_told_several() { return true; }

void* address(Registry* registry, const char* function) {
    const PackedFile* file = packed_file();
    if (file && file->reads() && strcmp(function, kSeveralMemories) == 0) return reinterpret_cast<void*>(is_told_several);
    return stock_address(registry, function);
}

bool has_name(int op, const char* name) { return strcmp(functions.op_name(op), name) == 0; }

const char* unexpected() {
    if (!has_name(kAdd, "ADD") || !has_name(kMul, "MUL") || !has_name(kRmsNorm, "RMS_NORM") || !has_name(kScale, "SCALE") ||
        !has_name(kContiguous, "CONT") || !has_name(kReshape, "RESHAPE") || !has_name(kView, "VIEW") || !has_name(kPermute, "PERMUTE") ||
        !has_name(kGetRows, "GET_ROWS") || !has_name(kRope, "ROPE") || !has_name(kMulMat, "MUL_MAT") || !has_name(kFlashAttention, "FLASH_ATTN_EXT") ||
        !has_name(kUnary, "UNARY") || !has_name(kGlu, "GLU") || strcmp(functions.unary_name(kTanh), "TANH") != 0 ||
        strcmp(functions.glu_name(kGeglu), "GEGLU") != 0)
        return "its operations have other numbers";
    constexpr struct {
        int type;
        const char* name;
    } kTypes[] = {{kF16, "f16"},   {kBf16, "bf16"}, {kI32, "i32"},   {kQ4_0, "q4_0"}, {kQ4_1, "q4_1"}, {kQ5_0, "q5_0"},
                  {kQ5_1, "q5_1"}, {kQ8_0, "q8_0"}, {kQ4_K, "q4_K"}, {kQ5_K, "q5_K"}, {kQ6_K, "q6_K"}};
    for (const auto& [type, name] : kTypes)
        if (strcmp(functions.type_name(type), name) != 0) return "its types have other numbers";
    const BufferTypes* types = functions.extra_buffer_types();
    if (!types || types->last < types->first || types->end < types->last || types->last - types->first > 16) return "its list of buffer types is another";
    return nullptr;
}

}  // namespace
}  // namespace edge::ggml

using namespace edge;
using namespace edge::ggml;

// Adds the buffer type. Must be called before the first model is loaded, when the backend copies the list. Returns null, or why that failed.
EDGE_EXPORT const char* edge_ggml_register(const Functions* given, void* (*make)(size_t)) {
    if (variant) return nullptr;
    functions = *given;
    const Variant* chosen = chosen_variant();
    if (!chosen) return "no kernel for this processor";
    if (const char* reason = unexpected()) return reason;
    buffer_type.device = functions.registry_device(functions.cpu_registry(), 0);
    if (!buffer_type.device) return "it has no CPU device";
    if (!prepare_read_rows() || !prepare_watches()) return "no key of threads' own memory is left";
    BufferTypes* types = functions.extra_buffer_types();
    const size_t count = static_cast<size_t>(types->last - types->first);
    BufferType** list = static_cast<BufferType**>(make((count + 1) * sizeof(BufferType*)));
    if (!list) return "out of memory";
    list[0] = &buffer_type;
    if (count) memcpy(list + 1, types->first, count * sizeof(BufferType*));
    *types = {list, list + count + 1, list + count + 1};  // the old list is not freed, since another thread may be reading it
    Registry* registry = functions.cpu_registry();
    if (registry->address && registry->address(registry, kSeveralMemories)) {
        stock_address = registry->address;
        registry->address = address;
    }
    variant = chosen;
    enabled = true;
    return nullptr;
}

// Sets whether models that are loaded from now on use the buffer type.
EDGE_EXPORT void edge_ggml_switch(int on) { enabled = on && variant; }

// Returns whether an operation failed since the last call. ggml calls it after each operation, to know whether to end the graph
// (ggml_abort_callback).
EDGE_EXPORT bool edge_ggml_failed(void*) { return __atomic_load_n(&failed, __ATOMIC_RELAXED) && __atomic_exchange_n(&failed, false, __ATOMIC_RELAXED); }

// Returns the bytes of packed weights of this type and shape; 0 if they are not packed.
EDGE_EXPORT size_t edge_ggml_packed_bytes(const Tensor* tensor) { return packs(*tensor) ? packed_bytes(*tensor) : 0; }

// Returns how many rows of products have been skipped so far because they are not read.
EDGE_EXPORT int64_t edge_ggml_unread_rows() { return unread_rows(); }
