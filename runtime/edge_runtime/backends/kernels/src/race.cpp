// The race of runtime/edge_runtime/decoding/shared_noise.py, which defines the arrival times. They have the same bits here.
//
// Logarithm and exponential are computed here too, because the library does not use the system's math library.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "export.h"

namespace {

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15, kFirst = 0xBF58476D1CE4E5B9, kSecond = 0x94D049BB133111EB;
// The number of tokens in a group, the distance between them, and the stretch of the vocabulary that kApart groups cover.
constexpr int64_t kMembers = 64, kApart = 512, kStretch = kMembers * kApart;
constexpr uint64_t kGroups = 1ull << 32;
constexpr double kLn2 = 0.6931471805599453, kHalfRoot = 0.7071067811865476, kInfinity = __builtin_inf();

// 1 / n!
constexpr double kTaylor[] = {1.0,          1.0,           1.0 / 2,        1.0 / 6,         1.0 / 24,         1.0 / 120,        1.0 / 720,        1.0 / 5040,
                              1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800, 1.0 / 87178291200};

uint64_t output(uint64_t key, uint64_t number) {
    uint64_t mixed = (number + 1) * kGamma + key;
    mixed = (mixed ^ (mixed >> 30)) * kFirst;
    mixed = (mixed ^ (mixed >> 27)) * kSecond;
    return mixed ^ (mixed >> 31);
}

// Returns -ln(((drawn >> 12) + 0.5) / 2^52), with the operations in the same order as in the definition.
double exponential(uint64_t drawn) {
    const double value = static_cast<double>(drawn >> 12) + 0.5;
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    int exponent = static_cast<int>(bits >> 52) - 1022;
    bits = (bits & ((1ull << 52) - 1)) | (1022ull << 52);
    double mantissa;
    memcpy(&mantissa, &bits, sizeof mantissa);
    if (mantissa < kHalfRoot) {
        mantissa *= 2.0;
        exponent--;
    }
    const double quotient = (mantissa - 1.0) / (mantissa + 1.0), square = quotient * quotient;
    double series = 2.0 / 15;
    for (int n = 13; n > 0; n -= 2) series = series * square + 2.0 / n;
    return (52 - exponent) * kLn2 - series * quotient;
}

// Returns exp(x) for x <= 0: 2^k times the Taylor series of the remainder, which is at most ln(2) / 2, so that the 15th term is below 1e-18.
double weight(double x) {
    if (x < -708.0) return 0.0;  // the smallest normal number is 2^-1022
    const double k = static_cast<double>(static_cast<int64_t>(x / kLn2 - 0.5));
    // ln(2) is subtracted in two parts, so that the remainder is exact.
    const double rest = (x - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10;
    double sum = kTaylor[14];
    for (int n = 13; n >= 0; n--) sum = sum * rest + kTaylor[n];
    const uint64_t bits = static_cast<uint64_t>(static_cast<int64_t>(k) + 1023) << 52;
    double scale;
    memcpy(&scale, &bits, sizeof scale);
    return sum * scale;
}

int64_t group_of(int64_t token) { return token / kStretch * kApart + token % kApart; }

int64_t member_of(int64_t token) { return token / kApart % kMembers; }

double arrival(uint64_t key, int64_t token, uint64_t of_group) {
    const double first = exponential(of_group) / kMembers;
    if (static_cast<int64_t>(of_group % kMembers) == member_of(token)) return first;
    return first + exponential(output(key, static_cast<uint64_t>(token)));
}

}  // namespace

// Returns the index of the winner among `tokens` [count] with `weights` [count] >= 0; the first one if times are equal, 0 if all weights are 0.
EDGE_EXPORT int64_t edge_race(uint64_t key, const int64_t* tokens, const double* weights, int64_t count) {
    int64_t winner = 0;
    double best = kInfinity;
    for (int64_t i = 0; i < count; i++) {
        if (!(weights[i] > 0)) continue;
        const uint64_t of_group = output(key, kGroups + static_cast<uint64_t>(group_of(tokens[i])));
        const double time = arrival(key, tokens[i], of_group) / weights[i];
        if (time < best) {
            best = time;
            winner = i;
        }
    }
    return winner;
}

// Returns the token that wins with the weights exp(logit / temperature). `logits` [vocabulary] are not NaN, and the largest is finite. Returns -1 if
// there is not enough memory.
EDGE_EXPORT int64_t edge_race_of_all(uint64_t key, const float* logits, int64_t vocabulary, double temperature) {
    const int64_t stretches = (vocabulary + kStretch - 1) / kStretch, groups = stretches * kApart;
    float* largest = static_cast<float*>(malloc(static_cast<size_t>(groups) * (sizeof(float) + sizeof(double))));
    if (!largest) return -1;
    double* earliest = reinterpret_cast<double*>(largest + groups);
    for (int64_t group = 0; group < groups; group++) largest[group] = -__builtin_inff();
    for (int64_t begin = 0; begin < vocabulary; begin += kApart) {  // one member of each group in a stretch
        float* of_stretch = largest + begin / kStretch * kApart;
        const int64_t count = vocabulary - begin < kApart ? vocabulary - begin : kApart;
        for (int64_t i = 0; i < count; i++) of_stretch[i] = logits[begin + i] > of_stretch[i] ? logits[begin + i] : of_stretch[i];
    }
    float top = largest[0];
    for (int64_t group = 1; group < groups; group++) top = largest[group] > top ? largest[group] : top;
    // A lower bound of the factor by which a token's time is longer than the likeliest token's: exp(t) >= 1 + t + t^2 / 2 + t^3 / 6 for t >= 0.
    const auto later = [&](float logit) {
        const double t = (static_cast<double>(top) - static_cast<double>(logit)) / temperature;
        return 1 + t * (1 + t * (0.5 + t * (1.0 / 6)));
    };
    int64_t soonest = 0;
    for (int64_t group = 0; group < groups; group++) {
        earliest[group] = exponential(output(key, kGroups + static_cast<uint64_t>(group))) / kMembers * later(largest[group]);
        if (earliest[group] < earliest[soonest]) soonest = group;
    }

    int64_t winner = 0;
    double best = kInfinity;
    const auto run = [&](int64_t group) {
        const uint64_t of_group = output(key, kGroups + static_cast<uint64_t>(group));
        const double first = exponential(of_group) / kMembers;
        int64_t token = group / kApart * kStretch + group % kApart;
        for (int64_t member = 0; member < kMembers && token < vocabulary; member++, token += kApart) {
            if (first * later(logits[token]) > best) continue;
            const double its = weight((static_cast<double>(logits[token]) - static_cast<double>(top)) / temperature);
            if (!(its > 0)) continue;
            const double time = arrival(key, token, of_group) / its;
            if (time < best || (time == best && token < winner)) {
                best = time;
                winner = token;
            }
        }
    };
    run(soonest);  // gives an upper bound of the winner's time, which excludes most other groups
    for (int64_t group = 0; group < groups; group++) {
        if (earliest[group] <= best && group != soonest) run(group);
    }
    free(largest);
    return winner;
}
