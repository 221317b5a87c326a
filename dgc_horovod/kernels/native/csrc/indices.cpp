// Index codecs: Elias-Fano, and none where every element is sent.
#include "codecs.h"

namespace dgc {
namespace {

// Low bits one after another in 32-bit words, then the high parts in unary: position i sets bit (high part + i).
void encode_elias_fano(const Layout& layout, const int32_t* positions, int64_t count, uint32_t* out) {
    const int low = layout.low_bits;
    uint32_t* const unary = out + words(layout.capacity * low);
    uint64_t pending = 0, ones = 0, word = 0;  // of the unary part: 64 bits that are being filled, and their index
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
        if (bit / 64 != word) {
            memcpy(unary + 2 * word, &ones, 8);
            ones = 0;
            word = bit / 64;
        }
        ones |= 1ull << (bit % 64);
    }
    memcpy(unary + 2 * word, &ones, ones >> 32 ? 8 : 4);
    if (filled) *out = (uint32_t)pending;
}

// Reads the high parts of `count` positions; returns false if there are more or fewer.
bool decode_high(const uint32_t* unary, int64_t unary_words, int64_t count, int32_t* high) {
    int64_t found = 0;
    for (int64_t w = 0; w < unary_words; w += 2) {  // with longer words fewer ends of this loop are mispredicted
        uint64_t ones = unary[w];
        if (w + 1 < unary_words) ones |= (uint64_t)unary[w + 1] << 32;
        if (!ones) continue;
        if (found + __builtin_popcountll(ones) > count) return false;
        for (; ones; ones &= ones - 1, found++) high[found] = (int32_t)(32 * w + __builtin_ctzll(ones) - found);
    }
    return found == count;
}

bool decode_elias_fano(const Layout& layout, const uint32_t* data, int64_t count, int32_t* positions) {
    const int low = layout.low_bits;
    const int64_t low_words = words(layout.capacity * low);
    if (!decode_high(data + low_words, words(layout.capacity + ((layout.numel - 1) >> low)), count, positions)) {
        return false;
    }
    const uint64_t mask = (1ull << low) - 1;
    int64_t last = -1;
    bool sound = true;
    for (int64_t i = 0; i < count; i++) {
        const int64_t bit = i * low, word = bit / 32;
        const uint64_t next = word + 1 < low_words ? data[word + 1] : 0;
        const uint64_t here = low ? data[word] | next << 32 : 0;
        const int64_t position = ((int64_t)(uint32_t)positions[i] << low) | (int64_t)(here >> (bit % 32) & mask);
        sound &= position > last && position < layout.numel;
        positions[i] = (int32_t)(last = position);
    }
    return sound;
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
