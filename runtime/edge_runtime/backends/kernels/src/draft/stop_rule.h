// Decides when a draft ends early, by numbers from the draft-length policy. Formulas: edge_runtime/drafting/profit_policy.py.
#pragma once
#include <stdint.h>

namespace edge {

// The drafter's probability of a token falls into one of `bins` intervals, which are divided by bounds [bins - 1].
//   accept [bins]: the probability that a draft token in this bin is accepted
//   transition [bins, bins]: the probabilities of the next token's bin, after a token in this bin
//   further [longest + 1, bins]: after a token in this bin, the expected number of accepted ones among the next n
//   row_costs, draft_costs [longest + 1]: the costs of verifying and of drafting n tokens
struct StopRule {
    int64_t longest, any_prefix, bins;
    double rate;
    const double *bounds, *row_costs, *draft_costs, *accept, *transition, *further;
};

// A draft while it is made under a rule.
class RuledDraft {
  public:
    explicit RuledDraft(const StopRule& rule) : rule_(rule), worth_(1.0 - rule.rate * rule.row_costs[0]) {}

    // Adds a draft token with this probability; returns whether drafting another one pays.
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
    // Returns what another token adds to the worth of the round; next_bin [bins] are the probabilities of its bin.
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
