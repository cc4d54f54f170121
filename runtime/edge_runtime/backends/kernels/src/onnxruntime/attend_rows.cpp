// AttendRows(queries [1, 1, read x heads, dim], cached keys and values [1, 1, n, dim], new keys and values [1, 1, tokens, dim], positions of the
// queries [1, read] and of the new rows [1, tokens]): attention with one K/V head, to all cached rows, and causal among the new ones. The queries
// belong to the last `read` new rows. The positions are inputs for the function of the same name in the graph; here they are not needed.
#include <stdlib.h>

#include "onnxruntime/attention.h"
#include "onnxruntime/operators.h"

namespace edge {
namespace {

using namespace ort;

struct Kernel {
    Table api;
    Attend attend;
    int64_t heads;
};

Status* create(const Op*, Table api, const KernelInfo* info, void** out) {
    int64_t heads;
    EDGE_TRY(attribute(api, info, "num_heads", &heads));
    if (heads < 1) return create_status(api, kFail, "AttendRows: num_heads must be positive");
    Kernel* kernel = static_cast<Kernel*>(malloc(sizeof(Kernel)));
    if (!kernel || !chosen_variant()) {
        free(kernel);
        return create_status(api, kFail, "AttendRows: out of memory, or no kernel for this processor");
    }
    *kernel = {api, chosen_variant()->attend, heads};
    *out = kernel;
    return nullptr;
}

Status* compute(void* data, KernelContext* context) {
    const Kernel& kernel = *static_cast<Kernel*>(data);
    const Table api = kernel.api;
    const float* at[5];
    Shape shapes[5] = {};
    for (size_t i = 0; i < 5; i++) {
        EDGE_TRY(read_input(api, context, i, shapes[i], &at[i]));
        const Shape& s = shapes[i];
        const int64_t rows = shapes[i < 3 ? (i + 1) / 2 : 3].sizes[2];
        if (s.rank != 4 || s.sizes[0] != 1 || s.sizes[1] != 1 || s.sizes[2] != rows || s.sizes[3] != shapes[0].sizes[3] || s.sizes[3] < 1)
            return create_status(api, kFail, "AttendRows: inputs must be [1, 1, rows, dim], with as many keys as values");
    }
    const int64_t queries = shapes[0].sizes[2], dim = shapes[0].sizes[3], past = shapes[1].sizes[2], fresh = shapes[3].sizes[2];
    Value* result = nullptr;
    EDGE_TRY(output(api, context, 0, shapes[0].sizes, 4, &result));
    if (queries == 0) return nullptr;
    const int64_t heads = kernel.heads, skipped = fresh - queries / heads;
    if (queries % heads != 0 || skipped < 0) return create_status(api, kFail, "AttendRows: num_heads queries for each of the last new rows");
    void* to = nullptr;
    EDGE_TRY(tensor_data(api, result, &to));
    const Attention first = {at[0], at[1], at[2], at[3], at[4], past, fresh, heads, dim, 0, 0, skipped};
    return attend_all(api, context, kernel.attend, {first, 1, 0, 0, 0}, static_cast<float*>(to));
}

const char* op_name(const Op*) { return "AttendRows"; }
size_t input_count(const Op*) { return 7; }
Type input_type(const Op*, size_t index) { return index < 5 ? kFloat : kInt64; }

}  // namespace

constexpr Op ort::kAttendRows = operator_of({op_name, input_count, input_type, one_output, create, compute, free});

}  // namespace edge
