// The C interface of the native kernels. kernels/native/library.py declares the same; kernels/reference.py defines the
// results.
//
// Arithmetic, bit for bit the same for every instruction set and number of threads: float32 state, each product rounded
// before it is added (-ffp-contract=off), sums in float64 over a fixed tree, denormals kept.
#pragma once
#include <string.h>

#include <cstdint>

#define DGC_API extern "C" __attribute__((visibility("default")))

namespace dgc {

constexpr int64_t kChunk = 4096;  // elements summed together, and read by one thread at a time
constexpr int kLanes = 16;        // of the sums' tree
constexpr uint32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

enum Kind : int32_t { kLook, kResidual, kMomentum, kNesterov, kShared };
enum Bad : int32_t { kBadGradient = 1, kBadResidual = 2 };

// One parameter inside a bucket, and how its gradient enters the residual.
struct Segment {
    const float* gradient;
    int64_t start, numel;
    int32_t kind;
    float momentum;
    const float *rows, *columns;  // a shared second moment's factors
    int64_t width, offset;        // number of columns; index in the tensor of the first element
    float bound;                  // largest magnitude that enters
    int32_t unused;
};

// The results of a pass over a bucket.
struct Found {
    int32_t* positions;  // of the candidates, ascending, and the values there
    float* values;
    int32_t* loose_positions;  // the same in the order in which threads found them
    float* loose_values;
    int64_t capacity;     // of each of the four
    int64_t* chunk_at;    // per chunk: index of its first candidate among the loose ones, and their number
    int32_t* chunk_count;
    double* chunk_sums;   // per chunk: sum, sum of squares
    int64_t count;        // out: number of candidates; if more than `capacity`, none may be used
    double sum, squares;  // out: of the chunks that are summed
};

// The output of one parameter's part of the update.
struct Target {
    float* out;
    int64_t start, numel;
};

// The elements of one rank.
struct Contribution {
    const int32_t* positions;
    const float* values;
    int64_t count;
};

// Index of the first of ascending positions that is at or after `position`.
inline int64_t first_from(const int32_t* positions, int64_t count, int64_t position) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (positions[middle] < position) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// Layout of a packet's body: packet.py's PacketFormat in numbers.
struct Layout {
    int64_t numel, capacity;
    int64_t values_at;  // byte offset in the body, which follows the header
    int32_t index_codec, value_codec;
    int32_t low_bits;  // Elias-Fano: bits of a position that are stored as they are
    int32_t unused;
};

}  // namespace dgc
