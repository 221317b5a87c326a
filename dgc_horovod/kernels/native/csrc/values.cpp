// Value codecs. Every operation is exact or correctly rounded, so that NumPy and all instruction sets agree.
#include <cfloat>

#include "codecs.h"
#include "rounding.h"

namespace dgc {
namespace {

uint16_t fp16_of(float value) {
    const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000;
    uint32_t size = bits & kMagnitude;
    if (size >= bits_of(65504.0f)) return (uint16_t)(sign | 0x7bff);
    if (size < bits_of(6.103515625e-5f)) {  // below 2^-14: subnormal, in steps of 2^-24, rounded by the addition
        return (uint16_t)(sign | (bits_of(float_of(size) + 0.5f) - bits_of(0.5f)));
    }
    size += 0xfff + ((size >> 13) & 1);
    const uint32_t rounded = (size - (112u << 23)) >> 13;
    return (uint16_t)(sign | (rounded < 0x7bff ? rounded : 0x7bff));
}

float of_fp16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, size = half & 0x7fff;
    if (size < 0x400) return float_of(sign | bits_of((float)size * 5.9604644775390625e-8f));
    if (size >= 0x7c00) return float_of(sign | kInfinity | (size & 0x3ff) << 13);
    return float_of(sign | ((size << 13) + (112u << 23)));
}

uint16_t bf16_of(float value) {
    const uint32_t bits = bits_of(value);
    const int32_t all = (int32_t)(bits & kMagnitude), size = all < 0x7f7f0000 ? all : 0x7f7f0000;
    return (uint16_t)((uint32_t)(size + 0x7fff + ((size >> 16) & 1)) >> 16 | ((bits >> 16) & 0x8000));
}

// A scale that no encoder writes: negative or not finite.
bool impossible(float scale) { return bits_of(scale) >= kInfinity; }

float saturated(float x) { return x > FLT_MAX ? FLT_MAX : (x < -FLT_MAX ? -FLT_MAX : x); }

// -- a scale per block, 127 steps on either side of zero

void encode_8bit(const float* x, int64_t numel, uint8_t* codes, float* scale) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < numel; i++) {
        const uint32_t size = bits_of(x[i]) & kMagnitude;
        largest = size > largest ? size : largest;
    }
    *scale = float_of(largest) / 127.0f;
    constexpr float kToWhole = 12582912.0f;  // adding it rounds to an integer, ties to even
    for (int64_t i = 0; i < numel; i++) {
        const float steps = *scale > 0 ? x[i] / *scale : 0.0f;
        const float whole = (steps + kToWhole) - kToWhole;
        codes[i] = (uint8_t)(int8_t)(whole > 127 ? 127 : (whole < -127 ? -127 : whole));
    }
}

bool decode_8bit(const uint8_t* codes, int64_t numel, const float* scale, float* x) {
    if (impossible(*scale)) return false;
    for (int64_t i = 0; i < numel; i++) x[i] = saturated((float)(int8_t)codes[i] * *scale);
    return true;
}

// -- sign and one of eight magnitudes, evenly spaced between the block's least and largest on the scale of their bit
//    patterns, which is logarithmic by octaves and linear within one

constexpr uint32_t kOctave = 1 << 23;

void encode_4bit(const float* x, int64_t numel, uint8_t* codes, float* ends) {
    uint32_t most = 0, least = kMagnitude;
    for (int64_t i = 0; i < numel; i++) {
        const uint32_t size = bits_of(x[i]) & kMagnitude;
        most = size > most ? size : most;
        least = size < least ? size : least;
    }
    if (most > 7 * kOctave && least < most - 7 * kOctave) least = most - 7 * kOctave;
    ends[0] = float_of(least);
    ends[1] = float_of(most);
    const uint32_t range = most - least;
    for (int64_t i = 0; i < numel; i++) {
        const uint32_t bits = bits_of(x[i]), size = bits & kMagnitude;
        const uint32_t level = size > least ? (7 * (size - least) + range / 2) / range : 0;
        codes[i / 2] |= (uint8_t)(((bits >> 31) << 3 | level) << (4 * (i % 2)));
    }
}

bool decode_4bit(const uint8_t* codes, int64_t numel, const float* ends, float* x) {
    const uint32_t least = bits_of(ends[0]), most = bits_of(ends[1]);
    if (impossible(ends[1]) || least > most || most - least > 7 * kOctave) return false;
    uint32_t level[8];
    for (uint32_t j = 0; j < 8; j++) level[j] = least + ((most - least) * j + 3) / 7;
    for (int64_t i = 0; i < numel; i++) {
        const uint32_t code = codes[i / 2] >> (4 * (i % 2));
        x[i] = float_of((code & 8) << 28 | level[code & 7]);
    }
    return true;
}

// -- sign and one of two magnitudes: the means of the magnitudes below and above the block's mean

void encode_2bit(const float* x, int64_t numel, uint8_t* codes, float* means) {
    double sum = 0;
    for (int64_t i = 0; i < numel; i++) sum += __builtin_fabsf(x[i]);
    const double middle = sum / (double)numel;
    double sums[2] = {0, 0};
    int64_t counts[2] = {0, 0};
    for (int64_t i = 0; i < numel; i++) {
        const double size = __builtin_fabsf(x[i]);
        const int high = size >= middle;
        sums[high] += size;
        counts[high]++;
        codes[i / 4] |= (uint8_t)(((bits_of(x[i]) >> 31) << 1 | (uint32_t)high) << (2 * (i % 4)));
    }
    for (int high = 0; high < 2; high++) means[high] = counts[high] ? (float)(sums[high] / (double)counts[high]) : 0.0f;
}

bool decode_2bit(const uint8_t* codes, int64_t numel, const float* means, float* x) {
    if (impossible(means[0]) || impossible(means[1])) return false;
    for (int64_t i = 0; i < numel; i++) {
        const uint32_t code = codes[i / 4] >> (2 * (i % 4));
        x[i] = float_of((code & 2) << 30 | bits_of(means[code & 1]));
    }
    return true;
}

// -- the codes of all blocks, then their scales

struct BlockCodec {
    int bits, scales;
    void (*encode)(const float*, int64_t, uint8_t*, float*);
    bool (*decode)(const uint8_t*, int64_t, const float*, float*);
};

BlockCodec block_codec(int32_t codec) {
    if (codec == k8Bit) return {8, 1, encode_8bit, decode_8bit};
    if (codec == k4Bit) return {4, 2, encode_4bit, decode_4bit};
    return {2, 2, encode_2bit, decode_2bit};
}

}  // namespace

bool encode_values(const Layout& layout, const float* values, int64_t count, uint8_t* out) {
    if (layout.value_codec < kFp32 || layout.value_codec > k2Bit) return false;
    uint16_t* const halves = reinterpret_cast<uint16_t*>(out);
    switch (layout.value_codec) {
        case kFp32: memcpy(out, values, 4 * count); return true;
        case kFp16:
            for (int64_t i = 0; i < count; i++) halves[i] = fp16_of(values[i]);
            return true;
        case kBf16:
            for (int64_t i = 0; i < count; i++) halves[i] = bf16_of(values[i]);
            return true;
    }
    const BlockCodec codec = block_codec(layout.value_codec);
    float* scales = reinterpret_cast<float*>(out + 4 * words(layout.capacity * codec.bits));
    for (int64_t i = 0; i < count; i += kScaleBlock, scales += codec.scales) {
        const int64_t numel = count - i < kScaleBlock ? count - i : kScaleBlock;
        codec.encode(values + i, numel, out + i * codec.bits / 8, scales);
    }
    return true;
}

bool decode_values(const Layout& layout, const uint8_t* data, int64_t count, float* values) {
    const uint16_t* const halves = reinterpret_cast<const uint16_t*>(data);
    if (layout.value_codec > k2Bit || layout.value_codec < kFp32) return false;
    if (layout.value_codec > kBf16) {
        const BlockCodec codec = block_codec(layout.value_codec);
        const float* scales = reinterpret_cast<const float*>(data + 4 * words(layout.capacity * codec.bits));
        for (int64_t i = 0; i < count; i += kScaleBlock, scales += codec.scales) {
            const int64_t numel = count - i < kScaleBlock ? count - i : kScaleBlock;
            if (!codec.decode(data + i * codec.bits / 8, numel, scales, values + i)) return false;
        }
        return true;
    }
    if (layout.value_codec == kFp32) memcpy(values, data, 4 * count);
    if (layout.value_codec == kFp16) {
        for (int64_t i = 0; i < count; i++) values[i] = of_fp16(halves[i]);
    }
    if (layout.value_codec == kBf16) {
        for (int64_t i = 0; i < count; i++) values[i] = float_of((uint32_t)halves[i] << 16);
    }
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const int32_t size = (int32_t)(bits_of(values[i]) & kMagnitude);
        largest = size > largest ? size : largest;
    }
    return (uint32_t)largest < kInfinity;
}

}  // namespace dgc

using namespace dgc;

// Writes the body of a packet, which must be zero before, and the decoded values. Returns the number of decoded values
// that are zero.
DGC_API int64_t dgc_encode(const Layout* layout, const int32_t* positions, const float* values, int64_t count,
                           uint8_t* body, float* decoded) {
    const KeepDenormals here;
    if (!encode_indices(*layout, positions, count, reinterpret_cast<uint32_t*>(body))) return -1;
    if (!encode_values(*layout, values, count, body + layout->values_at)) return -1;
    decode_values(*layout, body + layout->values_at, count, decoded);
    int32_t zeros = 0;
    for (int64_t i = 0; i < count; i++) zeros += decoded[i] == 0;
    return zeros;
}

// Decodes the body of a packet of `count` elements. Returns 0, or 1 for invalid positions, 2 for invalid values.
DGC_API int32_t dgc_decode(const Layout* layout, const uint8_t* body, int64_t count, int32_t* positions, float* values) {
    const KeepDenormals here;
    if (!decode_indices(*layout, reinterpret_cast<const uint32_t*>(body), count, positions)) return 1;
    return decode_values(*layout, body + layout->values_at, count, values) ? 0 : 2;
}

// See packet.Coder.checksum; `own` is the checksum's own word.
DGC_API uint32_t dgc_checksum(const uint32_t* data, int64_t count, int64_t own) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++) sum += (uint64_t)data[i] * (uint32_t)(2 * i + 1);
    sum -= (uint64_t)data[own] * (uint64_t)(2 * own + 1);
    return (uint32_t)((sum * 0x9e3779b97f4a7c15ull) >> 32);
}
