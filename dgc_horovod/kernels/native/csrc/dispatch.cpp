// The choice of the instruction set: the widest that this processor has, unless a narrower one is set.
#include <string.h>

#include "instructions.h"

namespace dgc {
namespace {

const Instructions* widest() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi")) return &kPlain;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        return &kAvx512;
    }
    return &kAvx2;
#else
    return &kPlain;
#endif
}

const Instructions* chosen = widest();

}  // namespace

const Instructions& instructions() { return *chosen; }

}  // namespace dgc

// Increased with every change of this interface, so that a library of another version is not used.
DGC_API int32_t dgc_interface() { return 11; }

DGC_API const char* dgc_instructions() { return dgc::instructions().name; }

// Use instruction set `name` ("plain", "AVX2", "AVX-512") from now on; returns 0 if this processor lacks it.
DGC_API int32_t dgc_use_instructions(const char* name) {
    const dgc::Instructions* best = dgc::widest();
    const dgc::Instructions* narrower[] = {
        &dgc::kPlain,
#if defined(__x86_64__)
        &dgc::kAvx2,
        &dgc::kAvx512,
#endif
    };
    for (const dgc::Instructions* one : narrower) {
        if (strcmp(one->name, name) == 0) {
            dgc::chosen = one;
            return 1;
        }
        if (one == best) break;
    }
    return 0;
}
