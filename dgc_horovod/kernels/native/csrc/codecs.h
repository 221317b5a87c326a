// The codecs of wire/codecs.py, byte for byte.
#pragma once
#include "dgc.h"

namespace dgc {

enum IndexCodec : int32_t { kEliasFano = 2, kEvery = 3 };
enum ValueCodec : int32_t { kFp32 = 1, kFp16 = 2, kBf16 = 3, k8Bit = 4, k4Bit = 5, k2Bit = 6 };

constexpr int64_t kScaleBlock = 256;  // values with common scales

inline int64_t words(int64_t bits) { return (bits + 31) / 32; }

// Returns false, and writes nothing, if the codec is unknown.
bool encode_indices(const Layout& layout, const int32_t* positions, int64_t count, uint32_t* out);
bool encode_values(const Layout& layout, const float* values, int64_t count, uint8_t* out);
// Returns false if the data are invalid; the output is then unspecified, but within bounds.
bool decode_indices(const Layout& layout, const uint32_t* data, int64_t count, int32_t* positions);
bool decode_values(const Layout& layout, const uint8_t* data, int64_t count, float* values);

}  // namespace dgc
