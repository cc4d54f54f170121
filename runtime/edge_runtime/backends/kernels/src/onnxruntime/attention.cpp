#include "onnxruntime/attention.h"

#include "onnxruntime/memory.h"
#include "onnxruntime/operators.h"

namespace edge {
namespace {

constexpr size_t kMaxStateBytes = size_t{2} << 20;  // the most bytes for states of spans that are computed before they are merged
constexpr int64_t kFewestSpans = 4;                 // the fewest such spans for which work is divided by spans

struct Job {
    const Attend& attend;
    const AllHeads& all;
    int64_t queries, groups, first_span, spans, size;
    float *states, *out;
    int64_t wave, begin, now;  // the most spans at once; the first one of the current wave, and how many spans it has

    Attention of_head(int64_t head) const {
        Attention attention = all.first;
        attention.queries += head * all.query_stride;
        attention.past_keys += head * all.past_stride, attention.past_values += head * all.past_stride;
        attention.new_keys += head * all.new_stride, attention.new_values += head * all.new_stride;
        return attention;
    }
    // Queries are divided into groups of nearly the same size.
    int64_t first(int64_t group) const { return group * queries / groups; }
    int64_t count(int64_t group) const { return first(group + 1) - first(group); }
    // The states of a wave, [heads, spans, queries]. After the first wave, index 0 has the merged states of all earlier spans.
    float* of_span(int64_t head, int64_t span) const { return states + (head * (wave + 1) + span + (begin != 0)) * queries * size; }
    void finish(const float* state, int64_t head, int64_t query) const {
        const int64_t each = all.first.heads;
        all.first.result(state, out + ((query / each * all.heads + head) * each + query % each) * all.first.dim);
    }
};

// One group of queries and one span.
void attend_one_span(void* data, size_t index) {
    const Job& job = *static_cast<Job*>(data);
    const int64_t group = static_cast<int64_t>(index) % job.groups, rest = static_cast<int64_t>(index) / job.groups;
    const int64_t head = rest / job.now, span = rest % job.now, first = job.first(group);
    job.attend.span(job.of_head(head), first, job.count(group), job.first_span + job.begin + span, job.of_span(head, span) + first * job.size);
}

void merge_query(void* data, size_t index) {
    const Job& job = *static_cast<Job*>(data);
    const int64_t head = static_cast<int64_t>(index) / job.queries, query = static_cast<int64_t>(index) % job.queries;
    float* state = job.states + (head * (job.wave + 1) * job.queries + query) * job.size;
    for (int64_t span = job.begin ? 0 : 1; span < job.now; span++) job.attend.merge(job.all.first.dim, state, job.of_span(head, span) + query * job.size);
    if (job.begin + job.now == job.spans) job.finish(state, head, query);
}

ort::Status* attend_by_spans(ort::Table api, ort::KernelContext* context, Job& job) {
    ort::Status* status = nullptr;
    for (; job.begin < job.spans && !status; job.begin += job.wave) {
        job.now = job.spans - job.begin < job.wave ? job.spans - job.begin : job.wave;
        status = ort::parallel_for(api, context, attend_one_span, static_cast<size_t>(job.all.heads * job.groups * job.now), 0, &job);
        if (!status) status = ort::parallel_for(api, context, merge_query, static_cast<size_t>(job.all.heads * job.queries), 0, &job);
    }
    return status;
}

// One group of queries and all its spans; states are [heads, groups, 2, kMaxQueries].
void attend_all_spans(void* data, size_t index) {
    const Job& job = *static_cast<Job*>(data);
    const int64_t group = static_cast<int64_t>(index) % job.groups, head = static_cast<int64_t>(index) / job.groups;
    const int64_t first = job.first(group), count = job.count(group);
    float *states = job.states + static_cast<int64_t>(index) * 2 * kMaxQueries * job.size, *next = states + kMaxQueries * job.size;
    job.attend.all_spans(job.of_head(head), first, count, states, next);
    for (int64_t r = 0; r < count; r++) job.finish(states + r * job.size, head, first + r);
}

}  // namespace

ort::Status* attend_all(ort::Table api, ort::KernelContext* context, const Attend& attend, const AllHeads& all, float* out) {
    const Attention& first = all.first;
    const int64_t queries = (first.fresh - first.skipped) * first.heads, begin = first.first_span(0);
    Job job = {attend, all, queries, (queries + kMaxQueries - 1) / kMaxQueries, begin, first.last_span(queries - 1) - begin + 1, first.state(),
               nullptr, out, 0, 0, 0};
    const size_t state = static_cast<size_t>(job.size) * sizeof(float), tasks = static_cast<size_t>(all.heads * job.groups);
    const size_t of_span = state * static_cast<size_t>(all.heads * queries);
    const int64_t room = static_cast<int64_t>(kMaxStateBytes / of_span);
    job.wave = room < job.spans ? room : job.spans;
    const bool by_spans = job.wave == job.spans || job.wave >= kFewestSpans;
    char* memory = scratch(by_spans ? of_span * static_cast<size_t>(job.wave + 1) : state * tasks * 2 * kMaxQueries);
    if (!memory) return ort::create_status(api, ort::kFail, "attention: out of memory");
    job.states = reinterpret_cast<float*>(memory);
    ort::Status* status = by_spans ? attend_by_spans(api, context, job) : ort::parallel_for(api, context, attend_all_spans, tasks, 0, &job);
    give_back_scratch(memory);
    return status;
}

}  // namespace edge
