// The inner loops, once per instruction set: each of plain.cpp, avx2.cpp and avx512.cpp makes one table of them.
#pragma once
#include "dgc.h"

namespace dgc {

// A piece of one segment inside one chunk. u is the momentum.
struct Piece {
    float* u;
    float* v;
    const float* gradient;
    int64_t numel;
    int32_t position;  // of its first element in the bucket
    float scale, threshold;
    float row;             // with kShared: factor of the row that the piece is in, and of its columns
    const float* columns;
};

// Elements are prefetched into L2 this far ahead, a page: the processor's own prefetching ends at a page, and is rarely
// far enough ahead where an element needs more work than an addition.
constexpr int64_t kAhead = 1024;

// Positions of the candidates of one chunk. Room for a few more: they are written four at a time.
struct Hits {
    int32_t positions[kChunk + 4];
    int32_t count = 0;
    bool many = false;  // whether many candidates are expected
};

struct Instructions {
    const char* name;
    // Updates u and v with a gradient (kLook: with nothing), notes candidates; returns Bad flags.
    int32_t (*update)(const Segment& how, const Piece& piece, Hits& hits);
    int64_t (*count_at_least)(const float* x, int64_t numel, float threshold);
    // Sum and sum of squares of at most kChunk elements, in the tree's order; elements not finite count as zero.
    void (*sums)(const float* x, int64_t numel, double* out);
    // Part of one row: adds squares to those of the columns; returns the sum of squares, and the product with `signs`.
    void (*measure_row)(const float* x, int64_t numel, const float* signs, float* columns, float* out);
};

extern const Instructions kPlain;
#if defined(__x86_64__)
extern const Instructions kAvx2, kAvx512;
#endif
const Instructions& instructions();

}  // namespace dgc
