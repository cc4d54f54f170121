// When a draft ends before its length: what a policy knows, as numbers. Formulas: edge_runtime/drafting/profit_policy.py.
#pragma once
#include <stdint.h>

namespace edge {

// Of `bins` intervals of the drafter's probability, divided by bounds [bins - 1]: the share that is accepted, accept [bins], the share of each
// interval among the next drafts, transition [bins, bins], and the expected number of accepted drafts among the n after one, further
// [longest + 1, bins]. Costs of verifying and of drafting n tokens: row_costs and draft_costs [longest + 1].
struct StopRule {
    int64_t longest, any_prefix, bins;
    double rate;
    const double *bounds, *row_costs, *draft_costs, *accept, *transition, *further;
};

// One draft under a rule.
class RuledDraft {
  public:
    explicit RuledDraft(const StopRule& rule) : rule_(rule), worth_(1.0 - rule.rate * rule.row_costs[0]) {}

    // Takes the probability of the next draft; returns whether another one pays.
    bool add(double probability) {
        int64_t bin = 0;
        while (bin < rule_.bins - 1 && probability >= rule_.bounds[bin]) bin++;
        drafted_++;
        chain_ *= rule_.accept[bin];
        tokens_ += chain_;
        const double worth = tokens_ - rule_.rate * rule_.row_costs[drafted_];
        if (worth > worth_ || !rule_.any_prefix) worth_ = worth;
        return drafted_ < rule_.longest && gain(rule_.transition + bin * rule_.bins) > 0;
    }

  private:
    // What another draft adds to the worth of the round; next_bin [bins]: how likely it is of each interval.
    double gain(const double* next_bin) const {
        const int64_t next = drafted_ + 1;
        double sum = 0;
        for (int64_t bin = 0; bin < rule_.bins; bin++) {
            const double chain = chain_ * rule_.accept[bin], tokens = tokens_ + chain;
            double best = tokens - rule_.rate * rule_.row_costs[next];
            if (rule_.any_prefix && worth_ > best) best = worth_;
            for (int64_t more = 1; next + more <= rule_.longest; more++) {
                const double spent = rule_.rate * (rule_.row_costs[next + more] + (rule_.draft_costs[next + more] - rule_.draft_costs[next]));
                const double worth = tokens + chain * rule_.further[more * rule_.bins + bin] - spent;
                if (worth > best) best = worth;
            }
            sum += next_bin[bin] * best;
        }
        return sum - rule_.rate * (rule_.draft_costs[next] - rule_.draft_costs[drafted_]) - worth_;
    }

    const StopRule& rule_;
    double chain_ = 1, tokens_ = 1, worth_;
    int64_t drafted_ = 0;
};

}  // namespace edge
