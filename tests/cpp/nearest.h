// The oracle of conversions: a search of a whole table in fp64, for tests and fuzzers.
#pragma once
#include <cmath>

// The code of 0 .. last whose value is nearest, ties to the even code; the values are in order.
template <class Decode>
int nearest_code(double magnitude, int last, Decode decode) {
    int best = 0;
    for (int code = 1; code <= last; ++code) {
        const double gap = std::fabs(decode(code) - magnitude), best_gap = std::fabs(decode(best) - magnitude);
        if (gap < best_gap || (gap == best_gap && code % 2 == 0)) best = code;
    }
    return best;
}
