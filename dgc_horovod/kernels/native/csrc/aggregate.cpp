// Update of the residual at sent elements; aggregation of all ranks' elements.
#include <atomic>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "dgc.h"
#include "rounding.h"
#include "threads.h"

using namespace dgc;

namespace {

// Elements that are written one by one are far apart: their cache lines are prefetched this many elements ahead, into
// L2. L1 handles only a few misses at a time, and would make this loop wait for each of them.
constexpr int64_t kAhead = 64;

void prefetch(const void* x) { __builtin_prefetch(x, 1, 2); }

}  // namespace

// v = values - decoded at the positions, u = 0 (if given); u's old values go to `masked`.
DGC_API void dgc_settle(float* v, float* u, const int32_t* positions, const float* values, const float* decoded,
                        int64_t count, float* masked) {
    const KeepDenormals here;
    for (int64_t i = 0; i < count; i++) {
        const int64_t ahead = positions[i + kAhead < count ? i + kAhead : i];
        prefetch(v + ahead);
        if (u) prefetch(u + ahead);
        v[positions[i]] = values[i] - decoded[i];
        if (u) {
            masked[i] = u[positions[i]];
            u[positions[i]] = 0;
        }
    }
}

DGC_API void dgc_put(float* x, const int32_t* positions, const float* values, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[positions[i]] = values[i];
}

namespace {

bool not_finite(float x) { return (bits_of(x) & kInfinity) == kInfinity; }

// Zeroes memory that is not read again soon: lines that are only written need not be loaded first.
void zero_past_cache(float* x, int64_t numel) {
#if defined(__x86_64__)
    for (; numel > 0 && reinterpret_cast<uintptr_t>(x) % 64; numel--) *x++ = 0.0f;
    const __m128 zero = _mm_setzero_ps();
    for (; numel >= 16; numel -= 16, x += 16) {
        for (int i = 0; i < 16; i += 4) _mm_stream_ps(x + i, zero);
    }
    _mm_sfence();
#endif
    memset(x, 0, 4 * numel);
}

// Adds the ranks' elements before `end` to one target, rank by rank. Returns whether all changed elements are finite.
bool add(const Target& target, int64_t end, const Contribution* ranks, int64_t workers, float scale, int64_t* next) {
    float* const out = target.out - target.start;
    bool finite = true;
    for (int64_t rank = 0; rank < workers; rank++) {
        const Contribution& one = ranks[rank];
        int64_t i = next[rank];
        for (; i < one.count && one.positions[i] < end; i++) {
            if (i + kAhead < one.count && one.positions[i + kAhead] < end) prefetch(out + one.positions[i + kAhead]);
            float& sum = out[one.positions[i]];
            sum += one.values[i] * scale;
            finite &= !not_finite(sum);
        }
        next[rank] = i;
    }
    return finite;
}

constexpr int64_t kFillBlock = 1 << 14;
constexpr int64_t kFewAdditions = 24;  // elements for each addition, from which zeroing past the cache pays

}  // namespace

// See Kernels.aggregate_into. `next` has room for one number per rank and thread. Returns whether every element is
// finite.
DGC_API int32_t dgc_fill(const Target* targets, int64_t num_targets, const Contribution* ranks, int64_t workers,
                         float scale, int32_t fresh, int64_t* next, int64_t threads) {
    const int64_t numel = targets[num_targets - 1].start + targets[num_targets - 1].numel;
    const int64_t parts = parts_of(numel, threads);
    int64_t additions = 0;
    for (int64_t rank = 0; rank < workers; rank++) additions += ranks[rank].count;
    const bool few = fresh && additions * kFewAdditions < numel;
    std::atomic<bool> finite{true};
    in_parts(parts, [&](int64_t part) {
        const int64_t first = numel * part / parts, last = numel * (part + 1) / parts;
        int64_t* const mine = next + part * workers;
        for (int64_t rank = 0; rank < workers; rank++) {
            mine[rank] = first_from(ranks[rank].positions, ranks[rank].count, first);
        }
        for (int64_t t = 0; t < num_targets; t++) {
            const Target& target = targets[t];
            const int64_t begin = target.start > first ? target.start : first;
            const int64_t stop = target.start + target.numel < last ? target.start + target.numel : last;
            // few additions: all at once; else block by block, each zeroed and added to while it is in the cache
            const int64_t block = few || !fresh ? numel : kFillBlock;
            for (int64_t at = begin; at < stop; at += block) {
                const int64_t end = at + block < stop ? at + block : stop;
                float* const out = target.out + (at - target.start);
                if (few) {
                    zero_past_cache(out, end - at);
                } else if (fresh) {
                    memset(out, 0, 4 * (end - at));
                }
                if (!add(target, end, ranks, workers, scale, mine)) finite = false;
            }
        }
    });
    return finite;
}

// See Kernels.aggregate_dense. Returns whether every element is finite.
DGC_API int32_t dgc_fill_summed(const Target* targets, int64_t num_targets, const float* summed, float scale) {
    const KeepDenormals here;
    bool finite = true;
    for (int64_t t = 0; t < num_targets; t++) {
        const Target& target = targets[t];
        for (int64_t i = 0; i < target.numel; i++) {
            target.out[i] = summed[target.start + i] * scale;
            finite &= !not_finite(target.out[i]);
        }
    }
    return finite;
}
