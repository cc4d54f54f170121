// What this library assumes about ggml, in the one release of llama.cpp that the runtime is pinned to: structures and numbers from
// ggml/include/ggml.h, ggml/src/ggml-backend-impl.h and ggml/src/ggml-cpu. register.cpp checks those that can be checked at run time.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace edge::ggml {

// enum ggml_type
constexpr int kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14, kI32 = 26, kBf16 = 30;
// enum ggml_op
constexpr int kNone = 0, kAdd = 2, kMul = 7, kRmsNorm = 25, kMulMat = 29, kScale = 32, kContiguous = 35, kReshape = 36, kView = 37, kPermute = 38,
              kGetRows = 40, kRope = 48, kFlashAttention = 74, kUnary = 91, kGlu = 100;
// enum ggml_op_hint, the second parameter of a product: its first matrix is a Hadamard matrix
constexpr int kHadamard = 1;
// enum ggml_tensor_flag
constexpr int kOutput = 2;
constexpr int kDimensions = 4, kSources = 10;
// enum ggml_unary_op and ggml_glu_op, the first parameter of these operations. The second parameter of a GLU says whether its halves are swapped.
constexpr int kTanh = 4, kGeglu = 1;
// enum ggml_backend_buffer_usage
constexpr int kWeights = 1;
// enum ggml_status
constexpr int kSuccess = 0;

struct Buffer;
struct BufferType;
struct Device;
struct Threadpool;

struct Tensor {
    int type;
    Buffer* buffer;
    int64_t ne[kDimensions];  // elements, the innermost dimension first
    size_t nb[kDimensions];   // strides in bytes
    int op;
    int32_t op_params[16];
    int32_t flags;
    Tensor* src[kSources];
    Tensor* view_src;
    size_t view_offs;
    void* data;
    char name[64];
    void* extra;
    char padding[8];
};

struct BufferTypeCalls {
    const char* (*name)(BufferType*);
    Buffer* (*allocate)(BufferType*, size_t);
    size_t (*alignment)(BufferType*);
    size_t (*most)(BufferType*);
    size_t (*tensor_size)(BufferType*, const Tensor*);
    bool (*is_host)(BufferType*);
};

struct BufferType {
    BufferTypeCalls calls;
    Device* device;
    void* context;
};

struct BufferCalls {
    void (*release)(Buffer*);
    void* (*base)(Buffer*);
    int (*init_tensor)(Buffer*, Tensor*);
    void (*fill_tensor)(Buffer*, Tensor*, uint8_t value, size_t offset, size_t size);
    void (*set_tensor)(Buffer*, Tensor*, const void* data, size_t offset, size_t size);
    void (*get_tensor)(Buffer*, const Tensor*, void* data, size_t offset, size_t size);
    void (*set_tensor_2d)(Buffer*, Tensor*, const void*, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d)(Buffer*, const Tensor*, void*, size_t, size_t, size_t, size_t, size_t);
    bool (*copy_tensor)(Buffer*, const Tensor* from, Tensor* to);
    void (*clear)(Buffer*, uint8_t value);
    void (*reset)(Buffer*);
};

struct Buffer {
    BufferCalls calls;
    BufferType* type;
    void* context;
    size_t size;
    int usage;
};

// struct ggml_compute_params, which each thread of the CPU backend gets with each operation.
struct Work {
    int thread, threads;
    size_t size;
    void* memory;
    Threadpool* pool;
    bool reference;
};

// The classes in ggml/src/ggml-cpu/traits.h. Both have a virtual destructor, which takes two entries of the virtual table and is never called.
struct Operation {
    virtual void destroy() {}
    virtual void destroy_and_free() {}
    virtual bool work_size(int threads, const Tensor* op, size_t& size) = 0;
    virtual bool compute(Work* work, Tensor* op) = 0;
};

struct ExtraBufferType {
    virtual void destroy() {}
    virtual void destroy_and_free() {}
    virtual bool supports(Device* device, const Tensor* op) = 0;
    virtual Operation* operation(const Tensor* op) = 0;
};

// std::vector<ggml_backend_buffer_type_t>, in the layout of libstdc++ and libc++.
struct BufferTypes {
    BufferType **first, **last, **end;
};

using ComputeOperation = void(const Work*, Tensor* op);

// struct ggml_backend_reg; `address` finds a function by its name.
struct Registry {
    int version;
    const char* (*name)(Registry*);
    size_t (*devices)(Registry*);
    Device* (*device)(Registry*, size_t index);
    void* (*address)(Registry*, const char* function);
    void* context;
};

// Functions of libggml-base and libggml-cpu, which the caller looks up (kernels/ggml.py).
struct Functions {
    Buffer* (*buffer_init)(BufferType*, BufferCalls, void* context, size_t size);
    size_t (*tensor_bytes)(const Tensor*);
    bool (*buffer_type_is_host)(BufferType*);
    const char* (*op_name)(int op);
    const char* (*unary_name)(int op);
    const char* (*glu_name)(int op);
    const char* (*type_name)(int type);
    Registry* (*cpu_registry)();
    Device* (*registry_device)(Registry*, size_t index);
    BufferTypes* (*extra_buffer_types)();
    void (*barrier)(Threadpool*);
    void (*set_chunk)(Threadpool*, int value);
    int (*add_chunk)(Threadpool*, int value);
    // Operations of the CPU backend; all threads call each of them.
    ComputeOperation *add, *mul, *rms_norm, *scale, *contiguous, *rope, *unary, *hadamard;
};

}  // namespace edge::ggml
