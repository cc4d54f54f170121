#include "read_rows.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

namespace edge::ggml {
namespace {

constexpr int kMaxNodes = 1 << 16;
constexpr const char* kLogits = "result_output";

// Which rows of a node its readers need: none so far, the read rows only, or all. In `dimension`, a token has `each` indices.
struct Demand {
    enum Kind : uint8_t { kNothing, kReadRows, kAllRows } kind;
    uint8_t dimension;
    int64_t each;
};
constexpr Demand kAll = {Demand::kAllRows, 0, 0};

// The value of a node's `extra`. Its lowest bit is set, which distinguishes it from a pointer.
struct Mark {
    static constexpr uintptr_t kOurs = 1, kDimension = 6, kUnfused = 8, kRest = 15;
    uintptr_t value;

    explicit Mark(const Tensor& node) : value(reinterpret_cast<uintptr_t>(node.extra)) {}
    bool ours() const { return value & kOurs; }
    int dimension() const { return static_cast<int>((value & kDimension) >> 1); }
    int64_t index() const { return static_cast<int64_t>(value >> 4); }
    const ReadRows* rows() const { return reinterpret_cast<const ReadRows*>(value & ~kRest); }
    static void* of_index(int64_t index) { return reinterpret_cast<void*>(static_cast<uintptr_t>(index) << 4 | kOurs); }
    static void* of_rows(const ReadRows* rows, int dimension) {
        return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(rows) | static_cast<uintptr_t>(dimension) << 1 | kOurs);
    }
};

// The graph that a thread is planning.
struct Plan {
    struct Node {
        Tensor* tensor;
        bool cuts;
        Demand demand;
    };
    alignas(16) ReadRows rows;
    const Tensor* ids;  // the numbers of the rows that are read
    Node* nodes;
    int64_t count, room;
    bool ended;
};

pthread_key_t key;
int64_t left_out = 0;

void release(void* memory) {
    Plan* plan = static_cast<Plan*>(memory);
    free(plan->nodes);
    free(plan);
}

// Returns this thread's plan; null without enough memory.
Plan* own_plan() {
    if (void* kept = pthread_getspecific(key)) return static_cast<Plan*>(kept);
    Plan* plan = static_cast<Plan*>(aligned_alloc(alignof(Plan), sizeof(Plan)));
    if (!plan) return nullptr;
    memset(static_cast<void*>(plan), 0, sizeof(Plan));
    if (pthread_setspecific(key, plan) != 0) {
        free(plan);
        return nullptr;
    }
    return plan;
}

bool append(Plan& plan, Tensor* node, bool cuts) {
    if (plan.count == plan.room) {
        const int64_t room = plan.room ? 2 * plan.room : 1024;
        void* nodes = room > kMaxNodes ? nullptr : realloc(plan.nodes, static_cast<size_t>(room) * sizeof(Plan::Node));
        if (!nodes) return false;
        plan.nodes = static_cast<Plan::Node*>(nodes);
        plan.room = room;
    }
    plan.nodes[plan.count++] = {node, cuts, {}};
    return true;
}

bool is_vector(const Tensor& t) { return t.ne[1] == 1 && t.ne[2] == 1 && t.ne[3] == 1; }
bool is_matrix(const Tensor& t) { return t.ne[2] == 1 && t.ne[3] == 1; }
bool same_shape(const Tensor& one, const Tensor& other) { return memcmp(one.ne, other.ne, sizeof one.ne) == 0; }
bool is_outermost(const Tensor& t, int dimension) {
    for (int d = dimension + 1; d < kDimensions; d++)
        if (t.ne[d] != 1) return false;
    return true;
}
int64_t values_below(const Tensor& t, int dimension) {
    int64_t values = 1;
    for (int d = 0; d < dimension; d++) values *= t.ne[d];
    return values;
}

// Whether a node selects some rows of a computed matrix, by numbers that are known before the graph is computed.
bool chooses_rows(const Functions& ggml, const Tensor& node) {
    const Tensor *from = node.src[0], *ids = node.src[1];
    return node.op == kGetRows && from && ids && from->op != kNone && is_matrix(*from) && ids->op == kNone && ids->type == kI32 && ids->nb[0] == 4 &&
           is_vector(*ids) && ids->ne[0] < from->ne[1] && ids->buffer && ggml.buffer_type_is_host(ids->buffer->type) && (ids->data || !ids->ne[0]);
}

// Reads the ascending row numbers in `ids`. Returns false if they are not rows of the batch, not ascending, or too scattered.
bool read_ids(const Tensor& ids, int64_t batch, ReadRows& rows) {
    const int32_t* numbers = static_cast<const int32_t*>(ids.data);
    rows.batch = batch;
    rows.count = 0;
    int64_t next = 0;
    for (int64_t i = 0; i < ids.ne[0]; i++) {
        const int64_t row = numbers[i];
        if (row < next || row >= batch) return false;
        if (i && row == next) {
            rows.runs[rows.count - 1].count++;
        } else {
            if (rows.count == kMaxRuns) return false;
            rows.runs[rows.count++] = {row, 1};
        }
        next = row + 1;
    }
    return true;
}

// Walks a planned graph from its end.
class Walk {
  public:
    explicit Walk(Plan& plan) : plan_(plan) {}

    void mark_nodes() {
        for (int64_t i = 0; i < plan_.count; i++)
            if (Tensor* node = plan_.nodes[i].tensor; !node->extra) node->extra = Mark::of_index(i);
        for (int64_t i = plan_.count; i--;) visit(plan_.nodes[i]);
        for (int64_t i = 0; i < plan_.count; i++) settle(plan_.nodes[i]);
    }

  private:
    void visit(Plan::Node& node) {
        const Tensor& t = *node.tensor;
        // A node without a reader is a result, such as K/V rows in the cache. One with another mark must not be cut.
        if (node.demand.kind != Demand::kReadRows || t.flags & kOutput || !Mark(t).ours()) node.demand = kAll;
        if (node.demand.kind == Demand::kReadRows && pass_on(node)) return;
        node.demand = kAll;
        const bool choice = t.op == kGetRows && t.src[1] == plan_.ids && t.src[0]->ne[1] == plan_.rows.batch && is_matrix(*t.src[0]);
        for (int i = 0; i < kSources; i++) ask(t.src[i], choice && i == 0 ? Demand{Demand::kReadRows, 1, 1} : kAll);
    }

    // Whether some rows of a node are enough, and it can be computed for these only. If so, passes the demand on to its sources.
    bool pass_on(const Plan::Node& node) {
        const Tensor& t = *node.tensor;
        const Demand& demand = node.demand;
        const int d = demand.dimension;
        if (t.ne[d] != plan_.rows.batch * demand.each) return false;
        switch (t.op) {
            case kReshape: return pass_through_reshape(t, demand);
            case kPermute:
                for (uint8_t from = 0; from < kDimensions; from++)
                    if (t.op_params[from] == d) return ask(t.src[0], {Demand::kReadRows, from, demand.each});
                return false;
            case kView: return same_shape(t, *t.src[0]) && memcmp(t.nb, t.src[0]->nb, sizeof t.nb) == 0 && t.data == t.src[0]->data && ask(t.src[0], demand);
            case kFlashAttention:
                if (!node.cuts || d != 2 || demand.each != 1 || t.ne[3] != 1) return false;
                for (int i = 1; i < kSources; i++) ask(t.src[i], kAll);
                return ask(t.src[0], {Demand::kReadRows, 1, 1});
            case kRope:
                if (!node.cuts || d != 2 || demand.each != 1 || t.src[1]->ne[0] != t.ne[2]) return false;
                break;
        }
        if (!node.cuts || d == 0 || !is_outermost(t, d)) return false;
        for (int i = 0; i < kSources; i++) {
            const Tensor* source = t.src[i];
            const bool rows = source && source->ne[d] == t.ne[d] && is_outermost(*source, d) && !(t.op == kMulMat && i == 0) && t.op != kRope;
            ask(t.src[i], rows || (t.op == kRope && i == 0) ? demand : kAll);
        }
        return true;
    }

    // Prefers a dimension in which a row is one index. For a batch of a single row, several dimensions would do.
    bool pass_through_reshape(const Tensor& t, const Demand& demand) {
        return is_outermost(t, demand.dimension) && (pass_reshaped(t, demand, true) || pass_reshaped(t, demand, false));
    }

    bool pass_reshaped(const Tensor& t, const Demand& demand, bool one_index) {
        const Tensor& from = *t.src[0];
        const int64_t values = values_below(t, demand.dimension) * demand.each;
        for (uint8_t d = 1; d < kDimensions; d++) {
            const int64_t below = values_below(from, d), each = below ? values / below : 0;
            const bool rows = each && each * below == values && from.ne[d] == plan_.rows.batch * each && is_outermost(from, d);
            if (rows && one_index == (each == 1)) return ask(t.src[0], {Demand::kReadRows, d, each});
        }
        return false;
    }

    bool ask(const Tensor* source, const Demand& demand) {
        if (!source || source->op == kNone || !Mark(*source).ours()) return true;
        const int64_t index = Mark(*source).index();
        if (index >= plan_.count || plan_.nodes[index].tensor != source) return true;  // a node of another graph
        Demand& before = plan_.nodes[index].demand;
        const bool same = before.kind == demand.kind && before.dimension == demand.dimension && before.each == demand.each;
        before = before.kind == Demand::kNothing || same ? demand : kAll;
        return true;
    }

    void settle(const Plan::Node& node) {
        Tensor& t = *node.tensor;
        if (!Mark(t).ours()) return;
        t.extra = nullptr;
        if (node.demand.kind != Demand::kReadRows || !node.cuts) return;
        uintptr_t mark = reinterpret_cast<uintptr_t>(Mark::of_rows(&plan_.rows, node.demand.dimension));
        if (t.op == kRmsNorm && !(t.flags & kOutput)) {
            // If nothing else reads a norm, ggml fuses it with the next product, for all rows. Marking it as an output prevents that.
            t.flags |= kOutput;
            mark |= Mark::kUnfused;
        }
        t.extra = reinterpret_cast<void*>(mark);
        if (t.op == kMulMat) count_left_out(node.demand.each);
    }

    void count_left_out(int64_t each) {
        int64_t rows = plan_.rows.batch;
        for (int i = 0; i < plan_.rows.count; i++) rows -= plan_.rows.runs[i].count;
        __atomic_fetch_add(&left_out, rows * each, __ATOMIC_RELAXED);
    }

    Plan& plan_;
};

// Removes what an earlier plan of the same graph set.
void clear_mark(Tensor& node) {
    const Mark mark(node);
    if (!mark.ours()) return;
    if (mark.value & Mark::kUnfused) node.flags &= ~kOutput;
    node.extra = nullptr;
}

bool is_floats(const Tensor* t) { return t && t->type == kF32; }

}  // namespace

bool prepare_read_rows() { return pthread_key_create(&key, release) == 0; }

void plan_node(const Functions& ggml, Tensor* node, bool cuts) {
    clear_mark(*node);
    Plan* plan = own_plan();
    if (!plan) return;
    if (plan->ended) {
        plan->ended = false;
        plan->count = 0;
        plan->ids = nullptr;
    }
    if (!append(*plan, node, cuts)) {
        plan->count = 0;
        plan->ids = nullptr;
        return;
    }
    if (!plan->ids && chooses_rows(ggml, *node) && read_ids(*node->src[1], node->src[0]->ne[1], plan->rows)) plan->ids = node->src[1];
    if (!(node->flags & kOutput) || strcmp(node->name, kLogits) != 0) return;
    if (plan->ids) Walk(*plan).mark_nodes();
    plan->ended = true;
}

Tensor* planned_before(int distance) {
    const Plan* plan = static_cast<Plan*>(pthread_getspecific(key));
    return plan && plan->count > distance ? plan->nodes[plan->count - 1 - distance].tensor : nullptr;
}

void end_plan() {
    if (Plan* plan = static_cast<Plan*>(pthread_getspecific(key))) plan->ended = true;
}

Restriction restriction_of(const Tensor& op) {
    const Mark mark(op);
    return mark.ours() ? Restriction{mark.rows(), mark.dimension()} : Restriction{nullptr, 0};
}

bool is_row_by_row(const Tensor& op) {
    const Tensor* rows = op.src[0];
    if (!is_floats(&op) || !is_floats(rows)) return false;
    switch (op.op) {
        case kAdd:
        case kMul:
            if (!is_floats(op.src[1])) return false;
            [[fallthrough]];
        case kRmsNorm:
        case kScale:
        case kUnary:
        case kContiguous: return same_shape(op, *rows);
        case kRope: return same_shape(op, *rows) && op.src[1] && op.src[1]->type == kI32 && is_vector(*op.src[1]);
        case kMulMat: return op.op_params[1] == kHadamard && is_floats(op.src[1]) && same_shape(op, *op.src[1]);
    }
    return false;
}

int64_t unread_rows() { return __atomic_load_n(&left_out, __ATOMIC_RELAXED); }

CutOperation::CutOperation(const Tensor& op, const ReadRows& rows, int dimension, const ReadRows::Run& run) : op_(op) {
    const int64_t each = op.ne[dimension] / rows.batch;
    first_ = run.first * each, count_ = run.count * each;
    op_.ne[dimension] = count_;
    op_.data = static_cast<char*>(op_.data) + static_cast<size_t>(first_) * op_.nb[dimension];
    if (op.op == kFlashAttention) {
        cut_source(0, 1);
        cut_source(3, 1);  // its mask
    } else if (op.op == kRope) {
        cut_source(0, dimension);
        cut_source(1, 0);  // positions
    } else if (op.op == kMulMat) {
        cut_source(1, dimension);
    } else {
        for (int i = 0; i < 2; i++)
            if (op.src[i] && op.src[i]->ne[dimension] == op.ne[dimension]) cut_source(i, dimension);
    }
}

void CutOperation::cut_source(int number, int dimension) {
    Tensor& source = sources_[number];
    source = *op_.src[number];
    source.ne[dimension] = count_;
    source.data = static_cast<char*>(source.data) + static_cast<size_t>(first_) * source.nb[dimension];
    op_.src[number] = &source;
}

}  // namespace edge::ggml
