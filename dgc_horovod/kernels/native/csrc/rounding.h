// One arithmetic for all settings of a thread (torch.set_flush_denormal): denormals are kept.
#pragma once
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <cstdint>

namespace dgc {

// While an object of this class lives, this thread does not flush denormals.
class KeepDenormals {
#if defined(__x86_64__)
    static constexpr unsigned kFlushes = 0x8000 | 0x0040;  // results to zero, operands as zero
    const unsigned before_ = _mm_getcsr();

  public:
    KeepDenormals() {
        if (before_ & kFlushes) _mm_setcsr(before_ & ~kFlushes);
    }
    ~KeepDenormals() {
        if (before_ & kFlushes) _mm_setcsr(before_);
    }
#elif defined(__aarch64__)
    static constexpr uint64_t kFlushes = 1 << 24;
    uint64_t before_;

  public:
    KeepDenormals() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
        if (before_ & kFlushes) __asm__ volatile("msr fpcr, %0" ::"r"(before_ & ~kFlushes));
    }
    ~KeepDenormals() {
        if (before_ & kFlushes) __asm__ volatile("msr fpcr, %0" ::"r"(before_));
    }
#else
  public:
    KeepDenormals() {}
#endif
    KeepDenormals(const KeepDenormals&) = delete;
    KeepDenormals& operator=(const KeepDenormals&) = delete;
};

}  // namespace dgc
