// AttendBuffers and ReadBuffers: GroupQueryAttention with rotary embedding and a window, on float32 buffers [1, heads, capacity, dim] that are both
// past and present. AttendBuffers writes new rows into them; ReadBuffers reads rows that another layer has written. The inputs are those of
// GroupQueryAttention: queries, new keys and values, both buffers, last row, rows, cosines, sines, positions. ReadBuffers may have another input,
// which it ignores: a row of zeros for the function of the same name in the graph, whose stock operators need at least one query.
#include <stdlib.h>
#include <string.h>

#include "onnxruntime/attention.h"
#include "onnxruntime/operators.h"

namespace edge {
namespace {

using namespace ort;

constexpr int64_t kMaxHeads = 1024;

struct Kernel {
    Table api;
    Attend attend;
    int64_t heads, kv_heads, window;
    bool writes;
};

Status* make(Table api, const KernelInfo* info, bool writes, void** out) {
    Kernel made = {api, {}, 0, 0, 0, writes};
    EDGE_TRY(attribute(api, info, "num_heads", &made.heads));
    EDGE_TRY(attribute(api, info, "kv_num_heads", &made.kv_heads));
    EDGE_TRY(attribute(api, info, "local_window_size", &made.window));
    if (made.kv_heads < 1 || made.heads < 1 || made.heads > kMaxHeads || made.heads % made.kv_heads != 0)
        return create_status(api, kFail, "attention: num_heads must be a multiple of kv_num_heads, at most 1024");
    Kernel* kernel = static_cast<Kernel*>(malloc(sizeof(Kernel)));
    if (!kernel || !chosen_variant()) {
        free(kernel);
        return create_status(api, kFail, "attention: out of memory, or no kernel for this processor");
    }
    made.attend = chosen_variant()->attend;
    *kernel = made;
    *out = kernel;
    return nullptr;
}

Status* create_writer(const Op*, Table api, const KernelInfo* info, void** out) { return make(api, info, true, out); }
Status* create_reader(const Op*, Table api, const KernelInfo* info, void** out) { return make(api, info, false, out); }

// The inputs, which are checked. The new rows are those of the buffers from row `past` on.
struct Inputs {
    const float *queries, *keys, *values, *cosine, *sine;
    float *key_buffer, *value_buffer;
    int64_t tokens, dim, capacity, past, position;
};

Status* read(const Kernel& kernel, KernelContext* context, Inputs& in) {
    const Table api = kernel.api;
    Shape queries, fresh[2], buffers[2], last_row, rows, tables[2], positions;
    const float* caches[2];
    const int32_t* count;
    const int64_t* position;
    EDGE_TRY(read_input(api, context, 0, queries, &in.queries));
    EDGE_TRY(read_input(api, context, 1, fresh[0], &in.keys));
    EDGE_TRY(read_input(api, context, 2, fresh[1], &in.values));
    EDGE_TRY(read_input(api, context, 3, buffers[0], &caches[0]));
    EDGE_TRY(read_input(api, context, 4, buffers[1], &caches[1]));
    EDGE_TRY(read_input(api, context, 5, last_row, &count));
    EDGE_TRY(read_input(api, context, 6, rows, &count));
    EDGE_TRY(read_input(api, context, 7, tables[0], &in.cosine));
    EDGE_TRY(read_input(api, context, 8, tables[1], &in.sine));
    EDGE_TRY(read_input(api, context, 9, positions, &position));
    in.key_buffer = const_cast<float*>(caches[0]), in.value_buffer = const_cast<float*>(caches[1]);
    if (queries.rank != 3 || queries.sizes[0] != 1 || queries.sizes[1] < (kernel.writes ? 1 : 0) || queries.sizes[2] % kernel.heads != 0)
        return create_status(api, kFail, "attention: queries must be [1, tokens, heads x dim]");
    in.tokens = queries.sizes[1], in.dim = queries.sizes[2] / kernel.heads;
    const int64_t written = kernel.writes ? in.tokens : 0;
    for (const Shape& shape : fresh)
        if (shape.rank != 3 || shape.sizes[0] != 1 || shape.sizes[1] != written || shape.sizes[2] != kernel.kv_heads * in.dim)
            return create_status(api, kFail, "attention: keys and values must be [1, tokens, heads x dim]");
    in.capacity = buffers[0].sizes[2];
    for (const Shape& shape : buffers)
        if (shape.rank != 4 || shape.sizes[0] != 1 || shape.sizes[1] != kernel.kv_heads || shape.sizes[2] != in.capacity || shape.sizes[3] != in.dim)
            return create_status(api, kFail, "attention: buffers must be [1, heads, rows, dim]");
    if (positions.rank != 2 || positions.sizes[0] != 1 || positions.sizes[1] != in.tokens || rows.count() != 1)
        return create_status(api, kFail, "attention: positions must be [1, tokens], and rows a scalar");
    in.past = *count - in.tokens, in.position = in.tokens ? position[0] : in.past;
    if (in.dim < 2 || in.dim % 2 || in.past < 0 || *count > in.capacity || in.position < in.past)
        return create_status(api, kFail, "attention: rows or positions outside the buffers");
    for (const Shape& shape : tables)
        if (shape.rank != 2 || shape.sizes[1] != in.dim / 2 || in.position > shape.sizes[0] - in.tokens)  // the sum could overflow
            return create_status(api, kFail, "attention: no rotation for these positions");
    for (int64_t i = 0; i < in.tokens; i++)
        if (position[i] != in.position + i) return create_status(api, kFail, "attention: positions must follow each other");
    return nullptr;
}

// Returns the buffers as outputs. These normally share the memory of the inputs; if not, the rows before the new ones are copied.
Status* present(const Kernel& kernel, KernelContext* context, Inputs& in) {
    if (!kernel.writes) return nullptr;
    const int64_t shape[] = {1, kernel.kv_heads, in.capacity, in.dim};
    float** buffers[] = {&in.key_buffer, &in.value_buffer};
    for (size_t i = 0; i < 2; i++) {
        Value* value = nullptr;
        void* to = nullptr;
        EDGE_TRY(output(kernel.api, context, i + 1, shape, 4, &value));
        EDGE_TRY(tensor_data(kernel.api, value, &to));
        if (to != *buffers[i]) memcpy(to, *buffers[i], static_cast<size_t>(kernel.kv_heads * in.capacity * in.dim) * sizeof(float));
        *buffers[i] = static_cast<float*>(to);
    }
    return nullptr;
}

void rotate(const float* from, const float* cosine, const float* sine, int64_t half, float* to) {
    for (int64_t i = 0; i < half; i++) {
        const float first = from[i], second = from[half + i];
        to[i] = first * cosine[i] - second * sine[i];
        to[half + i] = second * cosine[i] + first * sine[i];
    }
}

struct Rotation {
    const Kernel& kernel;
    const Inputs& in;
    float* queries;  // [kv_heads, tokens, heads of each, dim]
};

void rotate_token(void* data, size_t index) {
    const Rotation& job = *static_cast<Rotation*>(data);
    const Kernel& k = job.kernel;
    const Inputs& in = job.in;
    const int64_t token = static_cast<int64_t>(index), half = in.dim / 2, each = k.heads / k.kv_heads;
    const float *cosine = in.cosine + (in.position + token) * half, *sine = in.sine + (in.position + token) * half;
    for (int64_t head = 0; head < k.heads; head++)
        rotate(in.queries + (token * k.heads + head) * in.dim, cosine, sine, half,
               job.queries + ((head / each * in.tokens + token) * each + head % each) * in.dim);
    for (int64_t head = 0; k.writes && head < k.kv_heads; head++) {
        const int64_t row = (head * in.capacity + in.past + token) * in.dim, from = (token * k.kv_heads + head) * in.dim;
        rotate(in.keys + from, cosine, sine, half, in.key_buffer + row);
        memcpy(in.value_buffer + row, in.values + from, static_cast<size_t>(in.dim) * sizeof(float));
    }
}

Status* compute(void* data, KernelContext* context) {
    const Kernel& kernel = *static_cast<Kernel*>(data);
    const Table api = kernel.api;
    Inputs in;
    EDGE_TRY(read(kernel, context, in));
    const int64_t shape[] = {1, in.tokens, kernel.heads * in.dim}, each = kernel.heads / kernel.kv_heads;
    Value* result = nullptr;
    void* to = nullptr;
    EDGE_TRY(output(api, context, 0, shape, 3, &result));
    if (in.tokens == 0) return nullptr;
    EDGE_TRY(tensor_data(api, result, &to));
    EDGE_TRY(present(kernel, context, in));
    float* queries = static_cast<float*>(malloc(static_cast<size_t>(shape[1] * shape[2]) * sizeof(float)));
    if (!queries) return create_status(api, kFail, "attention: out of memory");
    Rotation rotation = {kernel, in, queries};
    Status* status = nullptr;
    if (in.tokens <= kFewRows)
        for (int64_t token = 0; token < in.tokens; token++) rotate_token(&rotation, static_cast<size_t>(token));
    else
        status = parallel_for(api, context, rotate_token, static_cast<size_t>(in.tokens), 0, &rotation);
    if (!status) {
        const int64_t past = in.past * in.dim, window = kernel.window > 0 ? kernel.window : 0;
        const Attention first = {queries, in.key_buffer, in.value_buffer, in.key_buffer + past, in.value_buffer + past, in.past, in.tokens, each,
                                 in.dim, in.position - in.past, window, 0};
        const int64_t buffer = in.capacity * in.dim;
        status = attend_all(api, context, kernel.attend, {first, kernel.kv_heads, in.tokens * each * in.dim, buffer, buffer}, static_cast<float*>(to));
    }
    free(queries);
    return status;
}

const char* writer_name(const Op*) { return "AttendBuffers"; }
const char* reader_name(const Op*) { return "ReadBuffers"; }
size_t input_count(const Op*) { return 10; }
size_t reader_inputs(const Op*) { return 11; }
int last_may_lack(const Op*, size_t index) { return index > 9; }
size_t three_outputs(const Op*) { return 3; }
Type input_type(const Op*, size_t index) { return index == 5 || index == 6 ? kInt32 : index == 9 ? kInt64 : kFloat; }

constexpr Op reader() {
    Op op = operator_of({reader_name, reader_inputs, input_type, one_output, create_reader, compute, free});
    op.input_kind = last_may_lack;
    return op;
}

}  // namespace

constexpr Op ort::kAttendBuffers = operator_of({writer_name, input_count, input_type, three_outputs, create_writer, compute, free});
constexpr Op ort::kReadBuffers = reader();

}  // namespace edge
