// Index codecs: plain int32, Elias-Fano, and none where every element is sent.
#include "codecs.h"

namespace dgc {
namespace {

// Low bits one after another in 32-bit words, then the high parts in unary: position i sets bit (high part + i).
void encode_elias_fano(const Layout& layout, const int32_t* positions, int64_t count, uint32_t* out) {
    const int low = layout.low_bits;
    uint32_t* const unary = out + words(layout.capacity * low);
    uint64_t pending = 0;
    int filled = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t position = (uint32_t)positions[i];
        pending |= (uint64_t)(position & ((1ull << low) - 1)) << filled;
        filled += low;
        if (filled >= 32) {
            *out++ = (uint32_t)pending;
            pending >>= 32;
            filled -= 32;
        }
        const uint64_t bit = (position >> low) + (uint64_t)i;
        unary[bit / 32] |= 1u << (bit % 32);
    }
    if (filled) *out = (uint32_t)pending;
}

bool decode_elias_fano(const Layout& layout, const uint32_t* data, int64_t count, int32_t* positions) {
    const int low = layout.low_bits;
    const uint32_t* const unary = data + words(layout.capacity * low);
    const int64_t unary_words = words(layout.capacity + ((layout.numel - 1) >> low));
    uint64_t pending = 0;
    int filled = 0;
    int64_t found = 0, last = -1;
    for (int64_t w = 0; w < unary_words; w++) {
        for (uint32_t ones = unary[w]; ones; ones &= ones - 1) {
            if (found == count) return false;
            const int64_t high = 32 * w + __builtin_ctz(ones) - found;
            if (filled < low) {
                pending |= (uint64_t)*data++ << filled;
                filled += 32;
            }
            const int64_t position = (high << low) | (int64_t)(pending & ((1ull << low) - 1));
            pending >>= low;
            filled -= low;
            if (position <= last || position >= layout.numel) return false;
            positions[found++] = (int32_t)(last = position);
        }
    }
    return found == count;
}

}  // namespace

bool encode_indices(const Layout& layout, const int32_t* positions, int64_t count, uint32_t* out) {
    switch (layout.index_codec) {
        case kEliasFano: encode_elias_fano(layout, positions, count, out); return true;
        case kEvery: return true;
    }
    return false;
}

bool decode_indices(const Layout& layout, const uint32_t* data, int64_t count, int32_t* positions) {
    switch (layout.index_codec) {
        case kEliasFano: return decode_elias_fano(layout, data, count, positions);
        case kEvery:
            if (count != 0 && count != layout.numel) return false;
            for (int64_t i = 0; i < count; i++) positions[i] = (int32_t)i;
            return true;
    }
    return false;
}

}  // namespace dgc
