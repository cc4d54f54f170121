// The operators of the domain edge.mtp, and their common code.
#pragma once
#include "onnxruntime/abi.h"

#define EDGE_TRY(call)                                    \
    do {                                                  \
        if (::edge::ort::Status* status = (call)) return status; \
    } while (0)

namespace edge::ort {

extern const Op kMatMulRows, kMatMulCapRows, kMatMulStatic, kMatMulHalves, kFeedForwardRows, kAttendRows, kAttendBuffers, kReadBuffers, kNormRows, kResidualRows;

constexpr size_t kMaxDimensions = 8;
constexpr int64_t kFewRows = 16;  // up to this many rows, small work is not divided among threads

struct Shape {
    int64_t sizes[kMaxDimensions];
    size_t rank;

    int64_t count() const {
        int64_t product = 1;
        for (size_t i = 0; i < rank; i++) product *= sizes[i];
        return product;
    }
};

inline Status* read_shape(Table api, const Value* value, Shape& out) {
    ShapeInfo* info = nullptr;
    EDGE_TRY(shape_of(api, value, &info));
    Status* status = dimension_count(api, info, &out.rank);
    if (!status && out.rank > kMaxDimensions) status = create_status(api, kFail, "an input must have at most 8 dimensions");
    if (!status) status = dimensions(api, info, out.sizes, out.rank);
    release_shape(api, info);
    return status;
}

template <class T>
Status* read_input(Table api, const KernelContext* context, size_t index, Shape& shape, const T** out) {
    const Value* value = nullptr;
    void* data = nullptr;
    EDGE_TRY(input(api, context, index, &value));
    EDGE_TRY(read_shape(api, value, shape));
    EDGE_TRY(tensor_data(api, const_cast<Value*>(value), &data));
    *out = static_cast<const T*>(data);
    return nullptr;
}

// Callbacks that several operators share.
inline const char* no_provider(const Op*) { return nullptr; }
inline Type float_type(const Op*, size_t) { return kFloat; }
inline size_t one_output(const Op*) { return 1; }
inline int required(const Op*, size_t) { return 0; }
inline int in_memory(const Op*, size_t) { return 0; }
inline int constant_one(const Op*) { return 1; }
inline int any_version(const Op*) { return 0x7fffffff; }

// An operator on processor memory: how it is made, run and freed, and what its inputs and outputs are.
struct Parts {
    const char* (*name)(const Op*);
    size_t (*input_count)(const Op*);
    Type (*input_type)(const Op*, size_t);
    size_t (*output_count)(const Op*);
    Status* (*create)(const Op*, Table, const KernelInfo*, void**);
    Status* (*compute)(void*, KernelContext*);
    void (*destroy)(void*);
};

constexpr Op operator_of(const Parts& parts) {
    Op op = {};
    op.version = kVersion, op.name = parts.name, op.provider = no_provider;
    op.input_count = parts.input_count, op.input_type = parts.input_type, op.input_kind = required, op.input_memory = in_memory;
    op.output_count = parts.output_count, op.output_type = float_type, op.output_kind = required;
    op.variadic_input_least = op.variadic_input_same = op.variadic_output_least = op.variadic_output_same = constant_one;
    op.create_kernel_v2 = parts.create, op.compute_v2 = parts.compute, op.destroy = parts.destroy;
    op.first_version = constant_one, op.last_version = any_version;
    return op;
}

}  // namespace edge::ort
