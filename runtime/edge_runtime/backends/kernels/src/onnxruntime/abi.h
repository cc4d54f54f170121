// The parts of onnxruntime's C interface that are used here. Its table of functions only grows at the end, so a function is identified by its index
// (onnxruntime, core/session/onnxruntime_c_api.cc, ort_api_1_to_N). A custom operator is a table of callbacks (OrtCustomOp, version 17).
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace edge::ort {

struct Status;
struct KernelInfo;
struct KernelContext;
struct Value;
struct ShapeInfo;
struct Domain;
struct SessionOptions;
struct Op;
using Table = void* const*;

constexpr uint32_t kVersion = 17;
enum Type : int { kFloat = 1, kUint8 = 2, kInt32 = 6, kInt64 = 7, kHalf = 10 };
enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };

struct ApiBase {
    Table (*get_api)(uint32_t version);
    const char* (*version_string)();
};

// Returns the function at this index of the table.
template <class Function>
Function* function(Table api, int place) {
    return reinterpret_cast<Function*>(api[place]);
}

inline Status* create_status(Table api, ErrorCode code, const char* message) { return function<Status*(ErrorCode, const char*)>(api, 0)(code, message); }
inline Status* create_domain(Table api, const char* name, Domain** out) { return function<Status*(const char*, Domain**)>(api, 26)(name, out); }
inline Status* add_op(Table api, Domain* domain, const Op* op) { return function<Status*(Domain*, const Op*)>(api, 27)(domain, op); }
inline Status* add_domain(Table api, SessionOptions* options, Domain* domain) { return function<Status*(SessionOptions*, Domain*)>(api, 28)(options, domain); }
inline Status* tensor_data(Table api, Value* value, void** out) { return function<Status*(Value*, void**)>(api, 51)(value, out); }
inline Status* element_type(Table api, const ShapeInfo* info, Type* out) { return function<Status*(const ShapeInfo*, Type*)>(api, 60)(info, out); }
inline Status* dimension_count(Table api, const ShapeInfo* info, size_t* out) { return function<Status*(const ShapeInfo*, size_t*)>(api, 61)(info, out); }
inline Status* dimensions(Table api, const ShapeInfo* info, int64_t* out, size_t count) { return function<Status*(const ShapeInfo*, int64_t*, size_t)>(api, 62)(info, out, count); }
inline Status* element_count(Table api, const ShapeInfo* info, size_t* out) { return function<Status*(const ShapeInfo*, size_t*)>(api, 64)(info, out); }
inline Status* shape_of(Table api, const Value* value, ShapeInfo** out) { return function<Status*(const Value*, ShapeInfo**)>(api, 65)(value, out); }
inline Status* attribute(Table api, const KernelInfo* info, const char* name, float* out) { return function<Status*(const KernelInfo*, const char*, float*)>(api, 85)(info, name, out); }
inline Status* attribute(Table api, const KernelInfo* info, const char* name, int64_t* out) { return function<Status*(const KernelInfo*, const char*, int64_t*)>(api, 86)(info, name, out); }
inline Status* output_count(Table api, const KernelContext* context, size_t* out) { return function<Status*(const KernelContext*, size_t*)>(api, 89)(context, out); }
inline Status* input(Table api, const KernelContext* context, size_t index, const Value** out) { return function<Status*(const KernelContext*, size_t, const Value**)>(api, 90)(context, index, out); }
inline Status* output(Table api, KernelContext* context, size_t index, const int64_t* shape, size_t count, Value** out) { return function<Status*(KernelContext*, size_t, const int64_t*, size_t, Value**)>(api, 91)(context, index, shape, count, out); }
inline void release_status(Table api, Status* status) { function<void(Status*)>(api, 93)(status); }
inline void release_shape(Table api, ShapeInfo* info) { function<void(ShapeInfo*)>(api, 99)(info); }
// Writes the null-terminated name of an input into `size` bytes and sets `size` to its length. A name that does not fit is an error.
inline Status* input_name(Table api, const KernelInfo* info, size_t index, char* out, size_t* size) { return function<Status*(const KernelInfo*, size_t, char*, size_t*)>(api, 232)(info, index, out, size); }
inline Status* constant_input(Table api, const KernelInfo* info, size_t index, int* is_constant, const Value** out) { return function<Status*(const KernelInfo*, size_t, int*, const Value**)>(api, 249)(info, index, is_constant, out); }
inline Status* parallel_for(Table api, const KernelContext* context, void (*run)(void*, size_t), size_t total, size_t batches, void* data) { return function<Status*(const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*)>(api, 274)(context, run, total, batches, data); }

// The callbacks, in onnxruntime's order. Those that are null are not used by our operators.
struct Op {
    uint32_t version;
    void* (*create_kernel)(const Op*, Table, const KernelInfo*);
    const char* (*name)(const Op*);
    const char* (*provider)(const Op*);
    Type (*input_type)(const Op*, size_t);
    size_t (*input_count)(const Op*);
    Type (*output_type)(const Op*, size_t);
    size_t (*output_count)(const Op*);
    void (*compute)(void*, KernelContext*);
    void (*destroy)(void*);
    int (*input_kind)(const Op*, size_t);
    int (*output_kind)(const Op*, size_t);
    int (*input_memory)(const Op*, size_t);
    int (*variadic_input_least)(const Op*);
    int (*variadic_input_same)(const Op*);
    int (*variadic_output_least)(const Op*);
    int (*variadic_output_same)(const Op*);
    Status* (*create_kernel_v2)(const Op*, Table, const KernelInfo*, void**);
    Status* (*compute_v2)(void*, KernelContext*);
    Status* (*infer_shape)(const Op*, void*);
    int (*first_version)(const Op*);
    int (*last_version)(const Op*);
    size_t (*inplace)(int**, int**);
    void (*release_inplace)(int*, int*);
    size_t (*alias)(int**, int**);
    void (*release_alias)(int*, int*);
};

}  // namespace edge::ort
