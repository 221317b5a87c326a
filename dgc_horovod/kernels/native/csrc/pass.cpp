// One pass over a bucket: accumulates gradients into momentum and residual, and collects candidates and sums.
#include <atomic>

#include "instructions.h"
#include "threads.h"

namespace dgc {
namespace {

int64_t chunks_of(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

// Only some chunks are summed (Kernels.sampled_sums), for a first guess: the sums of all would cost half as much time
// as the pass itself.
int64_t sum_stride(int64_t chunks) { return chunks < 128 ? 1 : (chunks < 1024 ? chunks / 64 : 16); }

// A threshold of zero means every element that is not zero: those from the smallest denormal on.
float above_zero(float threshold) { return bits_of(threshold) ? threshold : float_of(1); }

constexpr int32_t kMany = 24;  // candidates of a chunk, see `note`

struct Pass {
    float* v;
    int64_t numel;
    float* u;
    const Segment* segments;
    int64_t num_segments;
    float scale, threshold;  // elements of at least this magnitude are candidates; infinity: none
    const int32_t* left_at;  // positions, and values that v gets there before anything is added
    const float* left;
    int64_t num_left;
    bool want_sums;
    Found* found;
    int32_t *positions;  // hits in the order of finding
    float* values;
    std::atomic<int64_t> filled{0};
    std::atomic<int32_t> bad{0};
};

// The pieces of segments in [start, end); `segment` is the first segment before, and the last afterwards.
int32_t update_pieces(const Pass& pass, int64_t start, int64_t end, int64_t& segment, Hits& hits) {
    const Instructions& code = instructions();
    if (!pass.num_segments) {
        const Segment look{};
        const Piece piece{nullptr, pass.v + start,  nullptr, end - start, (int32_t)start,
                          1.0f,    pass.threshold, 1.0f,    nullptr};
        return code.update(look, piece, hits);
    }
    int32_t bad = 0;
    while (pass.segments[segment].start + pass.segments[segment].numel <= start) segment++;
    for (int64_t at = start; at < end;) {
        const Segment& how = pass.segments[segment];
        int64_t stop = how.start + how.numel < end ? how.start + how.numel : end, row = 0, column = 0;
        if (how.kind == kShared) {  // a piece is of one row
            const int64_t place = how.offset + (at - how.start);
            row = place / how.width;
            column = place - row * how.width;
            if (how.width - column < stop - at) stop = at + how.width - column;
        }
        const Piece piece{pass.u ? pass.u + at : nullptr,
                          pass.v + at,
                          how.gradient + (at - how.start),
                          stop - at,
                          (int32_t)at,
                          pass.scale,
                          pass.threshold,
                          how.rows ? how.rows[row] : 1.0f,
                          how.columns ? how.columns + column : nullptr};
        bad |= code.update(how, piece, hits);
        at = stop;
        if (at == how.start + how.numel && at < end) segment++;
    }
    return bad;
}

// A part of a chunk: makes deferred writes to v, from `next` of `left` on, then accumulates the gradients. Such writes
// go page by page, as far as memory has been prefetched: for a whole chunk they would wait for its lines.
int32_t update_run(const Pass& pass, int64_t start, int64_t end, int64_t& next, int64_t& segment, Hits& hits) {
    const int64_t page = pass.num_left ? kAhead : kChunk;
    int32_t bad = 0;
    for (int64_t at = start; at < end; at += page) {
        const int64_t stop = at + page < end ? at + page : end;
        for (; next < pass.num_left && pass.left_at[next] < stop; next++) pass.v[pass.left_at[next]] = pass.left[next];
        bad |= update_pieces(pass, at, stop, segment, hits);
    }
    return bad;
}

// The chunks [first, last) of the bucket.
void run_chunks(Pass& pass, int64_t first, int64_t last) {
    Hits hits;
    int32_t bad = 0;
    int64_t segment = 0, next_left = first_from(pass.left_at, pass.num_left, first * kChunk);
    const int64_t stride = sum_stride(chunks_of(pass.numel));
    for (int64_t chunk = first; chunk < last; chunk++) {
        const int64_t start = chunk * kChunk;
        const int64_t numel = pass.numel - start < kChunk ? pass.numel - start : kChunk;
        hits.many = hits.count >= kMany;  // as in the chunk before
        hits.count = 0;
        bad |= update_run(pass, start, start + numel, next_left, segment, hits);
        if (pass.want_sums && chunk % stride == 0) {
            instructions().sums(pass.v + start, numel, pass.found->chunk_sums + 2 * (chunk / stride));
        }
        const int64_t at = hits.count ? pass.filled.fetch_add(hits.count, std::memory_order_relaxed) : 0;
        pass.found->chunk_at[chunk] = at;
        pass.found->chunk_count[chunk] = hits.count;
        if (hits.count && at + hits.count <= pass.found->capacity) {
            memcpy(pass.positions + at, hits.positions, 4 * hits.count);
            for (int32_t j = 0; j < hits.count; j++) pass.values[at + j] = pass.v[hits.positions[j]];
        }
    }
    pass.bad.fetch_or(bad, std::memory_order_relaxed);
}

// Put the candidates of several threads into ascending order.
void order(Found& found, int64_t chunks) {
    if (!found.count) return;  // memory may be null then, which memcpy does not allow, even for zero bytes
    int64_t at = 0;
    for (int64_t i = 0; i < chunks; i++) {
        memcpy(found.positions + at, found.loose_positions + found.chunk_at[i], 4 * found.chunk_count[i]);
        memcpy(found.values + at, found.loose_values + found.chunk_at[i], 4 * found.chunk_count[i]);
        at += found.chunk_count[i];
    }
}

// The chunks' sums of one kind (0: sum, 1: squares), added pairwise in place; an odd last one stays.
double add_up(double* sums, int64_t chunks, int kind) {
    for (int64_t left = chunks; left > 1; left = (left + 1) / 2) {
        for (int64_t i = 0; i < left / 2; i++) sums[2 * i + kind] = sums[4 * i + kind] + sums[4 * i + 2 + kind];
        if (left % 2) sums[left - 1 + kind] = sums[2 * (left - 1) + kind];
    }
    return chunks ? sums[kind] : 0.0;
}

}  // namespace
}  // namespace dgc

using namespace dgc;

// See Kernels.accumulate; Without segments it only reads v. First, v is set to `left` at the
// ascending positions `left_at`. Returns Bad flags.
DGC_API int32_t dgc_pass(float* v, int64_t numel, float* u, const Segment* segments, int64_t num_segments, float scale,
                         float threshold, const int32_t* left_at, const float* left, int64_t num_left,
                         int32_t want_sums, Found* found, int64_t threads) {
    Pass pass{v,       numel, u,        segments,       num_segments, scale,   above_zero(threshold),
              left_at, left,  num_left, want_sums != 0, found,        nullptr, nullptr};
    const int64_t chunks = chunks_of(numel), parts = parts_of(numel, threads);
    pass.positions = parts > 1 ? found->loose_positions : found->positions;
    pass.values = parts > 1 ? found->loose_values : found->values;
    in_parts(parts, [&](int64_t part) { run_chunks(pass, chunks * part / parts, chunks * (part + 1) / parts); });
    found->count = pass.filled;
    if (parts > 1 && found->count <= found->capacity) order(*found, chunks);
    if (want_sums) {
        const int64_t stride = sum_stride(chunks), summed = (chunks + stride - 1) / stride;
        found->sum = add_up(found->chunk_sums, summed, 0);
        found->squares = add_up(found->chunk_sums, summed, 1);
    }
    return pass.bad;
}

// See Kernels.sums; `chunk_sums` has room for two sums a chunk.
DGC_API void dgc_sums(const float* x, int64_t numel, double* chunk_sums, int64_t threads, double* out) {
    const int64_t chunks = chunks_of(numel), parts = parts_of(numel, threads);
    in_parts(parts, [&](int64_t part) {
        for (int64_t i = chunks * part / parts; i < chunks * (part + 1) / parts; i++) {
            const int64_t left = numel - i * kChunk;
            instructions().sums(x + i * kChunk, left < kChunk ? left : kChunk, chunk_sums + 2 * i);
        }
    });
    out[0] = add_up(chunk_sums, chunks, 0);
    out[1] = add_up(chunk_sums, chunks, 1);
}

// See Kernels.measure; `out` holds zeros.
DGC_API void dgc_measure(const float* x, int64_t numel, int64_t offset, const float* signs, int64_t width, float* out) {
    constexpr int64_t kSignStep = 7919;  // first_sign
    const int64_t first = offset / width, rows = (offset + numel - 1) / width - first + 1, step = kSignStep % width;
    float *columns = out + rows, *products = columns + width;
    int64_t column = offset % width, sign = first * kSignStep % width;
    for (int64_t at = 0, row = 0; at < numel; row++) {
        const int64_t left = width - column < numel - at ? width - column : numel - at;
        float found[2];
        instructions().measure_row(x + at, left, signs + sign + column, columns + column, found);
        out[row] += found[0];
        products[row] += found[1];
        at += left;
        column = 0;
        sign = sign + step < width ? sign + step : sign + step - width;
    }
}

DGC_API int64_t dgc_count_at_least(const float* x, int64_t numel, float threshold, int64_t threads) {
    std::atomic<int64_t> count{0};
    const int64_t parts = parts_of(numel, threads);
    in_parts(parts, [&](int64_t part) {
        const int64_t start = numel * part / parts, end = numel * (part + 1) / parts;
        count += instructions().count_at_least(x + start, end - start, threshold);
    });
    return count;
}
