// Parallel work on the threads that the process already has.
#pragma once
#include <cstdint>

namespace dgc {

using Work = void (*)(void* context, int64_t part);

// Calls work(context, part) for every part in [0, parts), on up to `parts` threads at once.
void share(int64_t parts, Work work, void* context);

template <class Body>
void in_parts(int64_t parts, Body&& body) {
    share(parts, [](void* context, int64_t part) { (*static_cast<Body*>(context))(part); }, &body);
}

// Number of parts of `numel` elements that are worth their start, with up to `threads` threads.
inline int64_t parts_of(int64_t numel, int64_t threads) {
    constexpr int64_t kWorthAThread = 1 << 17;  // about 100 us of a pass, several times what a start costs
    const int64_t most = numel / kWorthAThread;
    return most < 2 ? 1 : (threads < most ? threads : most);
}

}  // namespace dgc
