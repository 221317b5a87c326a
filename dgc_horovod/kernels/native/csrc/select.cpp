// Exact selection by magnitude from given elements: by the bits of the magnitudes, whose order as integers is the same.
#include <vector>

#include "dgc.h"
#include "rounding.h"

namespace dgc {
namespace {

uint32_t magnitude_bits(float x) { return bits_of(x) & kMagnitude; }

struct Rank {
    uint32_t bits;   // magnitude of the k-th largest
    int64_t larger;  // number of strictly larger elements
};

// A radix select whose digits cover the range of the given values: selected values lie close together, and would share
// their top bits. Only the few elements in the digit of the k-th are read again.
Rank kth_largest(const float* x, int64_t numel, int64_t k) {
    constexpr int kDigit = 12;
    std::vector<float> rest;
    for (int64_t larger = 0;;) {
        int32_t low = kMagnitude, high = 0;  // signed: compilers have vectors of these everywhere
        for (int64_t i = 0; i < numel; i++) {
            const int32_t size = (int32_t)magnitude_bits(x[i]);
            low = size < low ? size : low;
            high = size > high ? size : high;
        }
        if (low == high) return {(uint32_t)low, larger};
        const uint32_t first = (uint32_t)low, range = (uint32_t)high - first;
        const int significant = 32 - __builtin_clz(range), shift = significant > kDigit ? significant - kDigit : 0;
        uint32_t histogram[1 << kDigit] = {};
        for (int64_t i = 0; i < numel; i++) histogram[(magnitude_bits(x[i]) - first) >> shift]++;
        uint32_t digit = range >> shift;
        while (larger + histogram[digit] < k) larger += histogram[digit--];
        if (rest.empty()) rest.resize(histogram[digit]);
        int64_t count = 0;
        for (int64_t i = 0; i < numel; i++) {
            if ((magnitude_bits(x[i]) - first) >> shift == digit) rest[count++] = x[i];
        }
        x = rest.data();
        numel = count;
    }
}

}  // namespace
}  // namespace dgc

using namespace dgc;

// The k-th largest magnitude of x, 1 <= k <= numel.
DGC_API float dgc_kth_largest(const float* x, int64_t numel, int64_t k) {
    return float_of(kth_largest(x, numel, k).bits);
}

// Keeps the k largest of the elements, in their order; of equal ones the first; zeros never. `from` has the positions,
// or is null if they are 0, 1, 2, ...; `positions` and `values` are the inputs themselves, or other memory for min(k,
// numel) + 1 elements: an element is written before it is known whether it is kept. Returns the number kept.
DGC_API int64_t dgc_keep_largest(const int32_t* from, const float* x, int64_t numel, int64_t k, int32_t* positions,
                                 float* values) {
    Rank rank{1, 0};  // everything that is not zero
    int64_t ties = numel;
    if (k < numel) {
        rank = kth_largest(x, numel, k);
        ties = k - rank.larger;
        if (rank.bits == 0) rank.bits = 1, ties = numel;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < numel; i++) {
        const float value = x[i];
        const uint32_t size = magnitude_bits(value);
        positions[kept] = from ? from[i] : (int32_t)i;
        values[kept] = value;
        kept += size >= rank.bits;  // no branch, which could not be predicted
        if (__builtin_expect(size == rank.bits, 0) && ties-- <= 0) kept--;
    }
    return kept;
}

// Keeps the elements of at least `threshold`, in place. Returns their number.
DGC_API int64_t dgc_keep_at_least(int32_t* positions, float* values, int64_t numel, float threshold) {
    const KeepDenormals here;
    int64_t kept = 0;
    for (int64_t i = 0; i < numel; i++) {
        const int32_t position = positions[i];
        const float value = values[i];
        positions[kept] = position;
        values[kept] = value;
        kept += __builtin_fabsf(value) >= threshold && value != 0;
    }
    return kept;
}
