#include "onnxruntime/attention.h"

#include "onnxruntime/memory.h"
#include "onnxruntime/operators.h"

namespace edge {
namespace {

constexpr size_t kMaxStateBytes = size_t{4} << 20;  // bytes of all states, up to which work is divided by spans

struct Job {
    const Attend& attend;
    const AllHeads& all;
    int64_t queries, groups, first_span, spans, size;
    float *states, *out;

    Attention of_head(int64_t head) const {
        Attention attention = all.first;
        attention.queries += head * all.query_stride;
        attention.past_keys += head * all.past_stride, attention.past_values += head * all.past_stride;
        attention.new_keys += head * all.new_stride, attention.new_values += head * all.new_stride;
        return attention;
    }
    int64_t count(int64_t group) const { return queries - group * kMaxQueries < kMaxQueries ? queries - group * kMaxQueries : kMaxQueries; }
    void finish(const float* state, int64_t head, int64_t query) const {
        const int64_t each = all.first.heads;
        all.first.result(state, out + ((query / each * all.heads + head) * each + query % each) * all.first.dim);
    }
};

// One group of queries and one span; states are [heads, spans, queries].
void attend_one_span(void* data, size_t index) {
    const Job& job = *static_cast<Job*>(data);
    const int64_t group = static_cast<int64_t>(index) % job.groups, rest = static_cast<int64_t>(index) / job.groups;
    const int64_t first = group * kMaxQueries;
    job.attend.span(job.of_head(rest / job.spans), first, job.count(group), job.first_span + rest % job.spans,
                    job.states + (rest * job.queries + first) * job.size);
}

void merge_query(void* data, size_t index) {
    const Job& job = *static_cast<Job*>(data);
    const int64_t head = static_cast<int64_t>(index) / job.queries, query = static_cast<int64_t>(index) % job.queries;
    float* state = job.states + (head * job.spans * job.queries + query) * job.size;
    for (int64_t span = 1; span < job.spans; span++) job.attend.merge(job.all.first.dim, state, state + span * job.queries * job.size);
    job.finish(state, head, query);
}

// One group of queries and all its spans; states are [heads, groups, 2, kMaxQueries].
void attend_all_spans(void* data, size_t index) {
    const Job& job = *static_cast<Job*>(data);
    const int64_t group = static_cast<int64_t>(index) % job.groups, head = static_cast<int64_t>(index) / job.groups;
    const int64_t first = group * kMaxQueries, count = job.count(group);
    float *states = job.states + static_cast<int64_t>(index) * 2 * kMaxQueries * job.size, *next = states + kMaxQueries * job.size;
    job.attend.all_spans(job.of_head(head), first, count, states, next);
    for (int64_t r = 0; r < count; r++) job.finish(states + r * job.size, head, first + r);
}

}  // namespace

ort::Status* attend_all(ort::Table api, ort::KernelContext* context, const Attend& attend, const AllHeads& all, float* out) {
    const Attention& first = all.first;
    const int64_t queries = (first.fresh - first.skipped) * first.heads, begin = first.first_span(0);
    Job job = {attend, all, queries, (queries + kMaxQueries - 1) / kMaxQueries, begin, first.last_span(queries - 1) - begin + 1, first.state(),
               nullptr, out};
    const size_t state = static_cast<size_t>(job.size) * sizeof(float), tasks = static_cast<size_t>(all.heads * job.groups);
    const size_t by_spans = state * static_cast<size_t>(all.heads * queries * job.spans);
    const bool divide_spans = by_spans <= kMaxStateBytes;
    char* memory = scratch(divide_spans ? by_spans : state * tasks * 2 * kMaxQueries);
    if (!memory) return ort::create_status(api, ort::kFail, "attention: out of memory");
    job.states = reinterpret_cast<float*>(memory);
    ort::Status* status;
    if (divide_spans) {
        status = ort::parallel_for(api, context, attend_one_span, tasks * static_cast<size_t>(job.spans), 0, &job);
        if (!status) status = ort::parallel_for(api, context, merge_query, static_cast<size_t>(all.heads * queries), 0, &job);
    } else {
        status = ort::parallel_for(api, context, attend_all_spans, tasks, 0, &job);
    }
    give_back_scratch(memory);
    return status;
}

}  // namespace edge
