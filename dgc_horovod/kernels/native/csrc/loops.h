// The bodies of the inner loops. Included by one file per instruction set, which is compiled for it; everything here is
// local to that file, and nothing of the C++ library is used, so that no such code leaks into the others.
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "instructions.h"

namespace dgc {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kWidth), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth), aligned(4)));
constexpr int kHalf = kWidth / 2;
typedef float HalfFloats __attribute__((vector_size(4 * kHalf), aligned(4)));
typedef int32_t HalfInts __attribute__((vector_size(4 * kHalf), aligned(4)));
typedef double Doubles __attribute__((vector_size(4 * kWidth), aligned(4)));

inline Floats load(const float* x) { return *reinterpret_cast<const Floats*>(x); }
inline void store(float* x, Floats y) { *reinterpret_cast<Floats*>(x) = y; }

inline Ints magnitude_bits(Floats x) { return (Ints)x & (int32_t)kMagnitude; }
inline Floats magnitude(Floats x) { return (Floats)magnitude_bits(x); }

// x within +-bound; NaN stays.
inline Floats within(Floats x, float bound) {
    const Floats most = Floats{} + bound;
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)-most, _mm512_min_ps((__m512)most, (__m512)x));
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)-most, _mm256_min_ps((__m256)most, (__m256)x));
#else
    const Ints above = magnitude(x) > most;
    return (Floats)(((Ints)x & ~above) | (((Ints)most | ((Ints)x & (int32_t)~kMagnitude)) & above));
#endif
}

inline Ints larger(Ints a, Ints b) { return a > b ? a : b; }

// Whether any of the magnitudes is an infinity or a NaN.
inline bool beyond_finite(Ints magnitudes) {
    bool found = false;
    for (int i = 0; i < kWidth; i++) found |= magnitudes[i] >= (int32_t)kInfinity;
    return found;
}

// x * scale; zero where x is not finite, which shows in `largest`, the maximum of magnitudes.
inline Floats scaled_if_finite(Floats x, float scale, Ints& largest) {
    const Ints size = magnitude_bits(x);
    largest = larger(largest, size);
#if defined(__AVX512F__)
    const __mmask16 finite = _mm512_cmplt_epi32_mask((__m512i)size, _mm512_set1_epi32((int32_t)kInfinity));
    return (Floats)_mm512_maskz_mul_ps(finite, (__m512)x, _mm512_set1_ps(scale));
#else
    return (Floats)((Ints)x & (size < (int32_t)kInfinity)) * scale;
#endif
}

// One bit per lane with x >= threshold.
inline uint32_t at_least(Floats x, float threshold) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(threshold), _CMP_GE_OQ);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(threshold), _CMP_GE_OQ));
#elif defined(__x86_64__)
    return (uint32_t)_mm_movemask_ps(_mm_cmpge_ps((__m128)x, _mm_set1_ps(threshold)));
#else
    uint32_t bits = 0;
    for (int i = 0; i < kWidth; i++) bits |= (uint32_t)(x[i] >= threshold) << i;
    return bits;
#endif
}

// Append the positions of the bits set in `found`, from `position` on. If there are `many`, in every other word one, a
// branch costs more than to write four positions each time and to count the valid ones.
inline void note(Hits& hits, uint64_t found, int32_t position) {
    int32_t* out = hits.positions + hits.count;
#if defined(__BMI__)
    if (hits.many) {
        const int count = __builtin_popcountll(found);
        hits.count += count;
        for (int i = 0; i < 4; i++, found &= found - 1) out[i] = position + (int32_t)_tzcnt_u64(found);
        if (__builtin_expect(count <= 4, 1)) return;
        out += 4;
    }
#endif
    for (; __builtin_expect(found != 0, 0); found &= found - 1) *out++ = position + __builtin_ctzll(found);
    hits.count = (int32_t)(out - hits.positions);
}

// A last, incomplete vector is copied to a full one.
struct Padded {
    float x[kWidth] = {};
    Padded(const float* from, int64_t numel) { memcpy(x, from, sizeof *x * numel); }
};

template <int kind>
int32_t update_as(const Segment& how, const Piece& piece, Hits& hits) {
    constexpr bool has_u = kind == kMomentum || kind == kNesterov;
    Ints largest_gradient = {}, largest_residual = {};
    const auto step = [&](float* u_at, float* v_at, const float* gradient, const float* column) -> uint32_t {
        Floats v = load(v_at);
        if (kind != kLook) {
            const Floats g = scaled_if_finite(load(gradient), piece.scale, largest_gradient);
            if (kind == kResidual) v += g;
            if (kind == kShared) v += within(g * piece.row * load(column), how.bound);
            if (has_u) {
                Floats u = load(u_at) * how.momentum;
                u += g;
                store(u_at, u);
                if (kind == kMomentum) {
                    v += u;
                } else {
                    v += g;
                    v += u * how.momentum;
                }
            }
            store(v_at, v);
        }
        const Floats size = magnitude(v);
        if (kind != kLook) largest_residual = larger(largest_residual, (Ints)size);
        return at_least(size, piece.threshold);
    };
    const auto fetch = [&](int64_t at) {
        __builtin_prefetch(piece.v + at, 1, 2);
        if (kind != kLook) __builtin_prefetch(piece.gradient + at, 0, 2);
    };
    int64_t i = 0;
    const auto steps = [&](int64_t count) {  // of whole vectors; one bit for each element
        uint64_t found = 0;
        for (int64_t j = 0; j < count; j++) {
            // with momentum, fetching three streams took a quarter longer than leaving them to the processor
            if (!has_u && j % (kLanes / kWidth) == 0) fetch(i + j * kWidth + kAhead);
            const int64_t at = i + j * kWidth;
            const uint64_t bits = step(piece.u + at, piece.v + at, piece.gradient + at, piece.columns + at);
            found |= bits << (j * kWidth);
        }
        note(hits, found, piece.position + (int32_t)i);
        i += count * kWidth;
    };
    while (i + 64 <= piece.numel) steps(64 / kWidth);
    if (piece.numel - i >= kWidth) steps((piece.numel - i) / kWidth);
    if (const int64_t rest = piece.numel - i) {
        Padded v(piece.v + i, rest), g(kind == kLook ? piece.v : piece.gradient + i, kind == kLook ? 0 : rest);
        Padded u(has_u ? piece.u + i : piece.v, has_u ? rest : 0);
        Padded column(kind == kShared ? piece.columns + i : piece.v, kind == kShared ? rest : 0);
        const uint32_t bits = step(u.x, v.x, g.x, column.x) & ((1u << rest) - 1);
        note(hits, bits, piece.position + (int32_t)i);
        if (kind != kLook) memcpy(piece.v + i, v.x, 4 * rest);
        if (has_u) memcpy(piece.u + i, u.x, 4 * rest);
    }
    return (beyond_finite(largest_gradient) ? kBadGradient : 0) | (beyond_finite(largest_residual) ? kBadResidual : 0);
}

int32_t update(const Segment& how, const Piece& piece, Hits& hits) {
    switch (how.kind) {
        case kResidual: return update_as<kResidual>(how, piece, hits);
        case kMomentum: return update_as<kMomentum>(how, piece, hits);
        case kNesterov: return update_as<kNesterov>(how, piece, hits);
        case kShared: return update_as<kShared>(how, piece, hits);
        default: return update_as<kLook>(how, piece, hits);
    }
}

int64_t count_at_least(const float* x, int64_t numel, float threshold) {
    int64_t count = 0, i = 0;
    for (; i + kWidth <= numel; i += kWidth) count += __builtin_popcount(at_least(magnitude(load(x + i)), threshold));
    for (; i < numel; i++) count += __builtin_fabsf(x[i]) >= threshold;
    return count;
}

// A row of the tree: one float64 per lane.
struct Row {
    Doubles part[kLanes / kHalf];
};

struct Rows {
    Row sum, squares;
};

inline Row operator+(const Row& a, const Row& b) {
    Row c;
    for (int i = 0; i < kLanes / kHalf; i++) c.part[i] = a.part[i] + b.part[i];
    return c;
}

// Half a vector of x as float64; zero for elements that are not finite.
inline Doubles widened(const float* x) {
    HalfFloats y = *reinterpret_cast<const HalfFloats*>(x);
    y = (HalfFloats)((HalfInts)y & ~(((HalfInts)y & (int32_t)kInfinity) == (int32_t)kInfinity));
#if defined(__AVX512F__)
    return (Doubles)_mm512_cvtps_pd((__m256)y);
#elif defined(__AVX2__)
    return (Doubles)_mm256_cvtps_pd((__m128)y);
#else
    return __builtin_convertvector(y, Doubles);
#endif
}

// 2^level rows of x, added pairwise, neighbours first.
template <int level>
inline Rows add_rows(const float* x) {
    if constexpr (level > 0) {
        const Rows a = add_rows<level - 1>(x), b = add_rows<level - 1>(x + (kLanes << (level - 1)));
        return {a.sum + b.sum, a.squares + b.squares};
    } else {
        Rows rows;
        for (int i = 0; i < kLanes / kHalf; i++) {
            rows.sum.part[i] = widened(x + i * kHalf);
            rows.squares.part[i] = rows.sum.part[i] * rows.sum.part[i];
        }
        return rows;
    }
}

constexpr int kRowBlockLevel = 3, kRowBlock = kLanes << kRowBlockLevel;

// The rest of the tree, over blocks of rows; elements beyond numel are zero.
Rows add_blocks(const float* x, int64_t numel, int64_t block) {
    if (block == kRowBlock) {
        if (numel >= kRowBlock) return add_rows<kRowBlockLevel>(x);
        float padded[kRowBlock] = {};
        if (numel > 0) memcpy(padded, x, 4 * numel);
        return add_rows<kRowBlockLevel>(padded);
    }
    const Rows a = add_blocks(x, numel, block / 2);
    if (numel <= block / 2) return a;
    const Rows b = add_blocks(x + block / 2, numel - block / 2, block / 2);
    return {a.sum + b.sum, a.squares + b.squares};
}

double add_lanes(const Row& row) {
    double lanes[kLanes];
    memcpy(lanes, &row, sizeof lanes);
    for (int half = kLanes / 2; half; half /= 2) {
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    }
    return lanes[0];
}

void sums(const float* x, int64_t numel, double* out) {
    const Rows rows = add_blocks(x, numel, kChunk);
    out[0] = add_lanes(rows.sum);
    out[1] = add_lanes(rows.squares);
}

// The sum of all lanes, in any order.
inline float total(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float lanes[kWidth];
    store(lanes, x);
    for (int half = kWidth / 2; half; half /= 2) {
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    }
    return lanes[0];
#endif
}

void measure_row(const float* x, int64_t numel, const float* signs, float* columns, float* out) {
    Floats squares = {}, products = {};
    int64_t i = 0;
    for (; i + kWidth <= numel; i += kWidth) {
        __builtin_prefetch(x + i + kAhead, 0, 2);
        const Floats g = load(x + i), square = g * g;
        store(columns + i, load(columns + i) + square);
        squares += square;
        products += g * load(signs + i);
    }
    float square = total(squares), product = total(products);
    for (; i < numel; i++) {
        columns[i] += x[i] * x[i];
        square += x[i] * x[i];
        product += x[i] * signs[i];
    }
    out[0] = square;
    out[1] = product;
}

}  // namespace
}  // namespace dgc
