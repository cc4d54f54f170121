// onnxruntime's operator edge.mtp::MatMulRows: MatMulNBits without zero points, by the kernels of this library. Weights are packed once,
// when the graph is opened; the session's own threads share the tiles.
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "onnxruntime/memory.h"
#include "onnxruntime/operators.h"
#include "pack.h"
#include "variants.h"

namespace edge {
namespace {

using namespace ort;

struct Kernel {
    Table api;
    const Variant* variant;
    PackedMatrix matrix;
};

Status* failed(Table api, const char* message) { return create_status(api, kFail, message); }

Status* constant_of(Table api, const KernelInfo* info, size_t index, size_t wanted, const void** out) {
    int constant = 0;
    const Value* value = nullptr;
    EDGE_TRY(constant_input(api, info, index, &constant, &value));
    if (!constant || !value) return failed(api, "MatMulRows: weights and scales must be constants");
    ShapeInfo* shape = nullptr;
    EDGE_TRY(shape_of(api, value, &shape));
    size_t count = 0;
    Status* status = element_count(api, shape, &count);
    release_shape(api, shape);
    if (status) return status;
    if (count != wanted) return failed(api, "MatMulRows: weights or scales have another size than K, N, bits and block_size say");
    void* data = nullptr;
    EDGE_TRY(tensor_data(api, const_cast<Value*>(value), &data));
    *out = data;
    return nullptr;
}

// The packed form replaces these bytes. They stay readable: the embedding, which is the head too, is looked up in them.
void give_back(const void* data, size_t bytes) {
#if defined(__linux__) && defined(MADV_PAGEOUT)
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) & ~(page - 1);
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(page - 1);
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_PAGEOUT);
#else
    (void)data, (void)bytes;
#endif
}

Status* create(const Op*, Table api, const KernelInfo* info, void** out) {
    int64_t inputs, outputs, bits, block;
    EDGE_TRY(attribute(api, info, "K", &inputs));
    EDGE_TRY(attribute(api, info, "N", &outputs));
    EDGE_TRY(attribute(api, info, "bits", &bits));
    EDGE_TRY(attribute(api, info, "block_size", &block));
    if (!fits(outputs, inputs, bits, block)) return failed(api, "MatMulRows: no kernel takes K, N, bits or block_size");
    const size_t bytes = static_cast<size_t>(outputs * (inputs * bits / 8));
    const void *levels, *scales;
    EDGE_TRY(constant_of(api, info, 1, bytes, &levels));
    EDGE_TRY(constant_of(api, info, 2, static_cast<size_t>(outputs * (inputs / block)), &scales));
    Kernel* kernel = static_cast<Kernel*>(malloc(sizeof(Kernel)));
    if (!kernel) return failed(api, "MatMulRows: out of memory");
    *kernel = {api, chosen_variant(), {}};
    if (!kernel->variant || !pack(kernel->matrix, outputs, inputs, static_cast<int>(bits), static_cast<int>(block), static_cast<const uint8_t*>(levels), static_cast<const float*>(scales))) {
        free(kernel);
        return failed(api, "MatMulRows: out of memory, or no kernel for this processor");
    }
    give_back(levels, bytes);
    *out = kernel;
    return nullptr;
}

void destroy(void* data) {
    Kernel* kernel = static_cast<Kernel*>(data);
    release(kernel->matrix);
    free(kernel);
}

struct Job {
    const Kernel* kernel;
    RoundedRows rows;
    const float* values;
    float* out;
};

void multiply_chunk(void* data, size_t index) {
    const Job& job = *static_cast<Job*>(data);
    const int64_t first = static_cast<int64_t>(index) * kTilesAtOnce;
    job.kernel->variant->multiply(job.kernel->matrix, job.rows, first, first + kTilesAtOnce, job.out);
}

void round_one(void* data, size_t row) {
    const Job& job = *static_cast<Job*>(data);
    const PackedMatrix& m = job.kernel->matrix;
    job.kernel->variant->round(job.values + row * m.inputs, m, 0, m.blocks(), static_cast<int64_t>(row), job.rows);
}

Status* compute(void* data, KernelContext* context) {
    const Kernel* kernel = static_cast<Kernel*>(data);
    const Table api = kernel->api;
    const PackedMatrix& m = kernel->matrix;
    Shape shape;
    const float* from = nullptr;
    EDGE_TRY(read_input(api, context, 0, shape, &from));
    if (shape.rank < 1) return failed(api, "MatMulRows: the input is a scalar");
    int64_t& last = shape.sizes[shape.rank - 1];
    if (last != m.inputs) return failed(api, "MatMulRows: the input's last dimension is not K");
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < shape.rank; i++) rows *= shape.sizes[i];
    last = m.outputs;
    Value* result = nullptr;
    EDGE_TRY(output(api, context, 0, shape.sizes, shape.rank, &result));
    if (rows == 0) return nullptr;
    void* to = nullptr;
    EDGE_TRY(tensor_data(api, result, &to));
    char* memory = scratch(RoundedRows::bytes(m, rows));
    if (!memory) return failed(api, "MatMulRows: out of memory");
    Job job = {kernel, {m, rows, memory}, from, static_cast<float*>(to)};
    Status* status = nullptr;
    if (rows <= kFewRows)
        for (int64_t row = 0; row < rows; row++) round_one(&job, row);
    else
        status = parallel_for(api, context, round_one, rows, 0, &job);
    if (!status) status = parallel_for(api, context, multiply_chunk, m.tiles() / kTilesAtOnce, 0, &job);
    give_back_scratch(memory);
    return status;
}

const char* op_name(const Op*) { return "MatMulRows"; }
Type input_type(const Op*, size_t index) { return index == 1 ? kUint8 : kFloat; }
size_t input_count(const Op*) { return 3; }

}  // namespace

constexpr Op ort::kMatMulRows = operator_of({op_name, input_count, input_type, one_output, create, compute, destroy});

}  // namespace edge
