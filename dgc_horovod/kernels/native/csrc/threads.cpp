#include "threads.h"

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "dgc.h"
#include "rounding.h"

namespace dgc {
namespace {

// GOMP_parallel of the OpenMP runtime that the process has loaded (torch's own), or null. Its idle threads spin for a
// while after each torch operation, so a second pool would compete with them for the cores.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
GompParallel gomp_parallel = nullptr;

struct Shared {
    Work work;
    void* context;
    int64_t parts;
    std::atomic<int64_t> next{0};
};

void take_parts(void* pointer) {
    const KeepDenormals here;
    Shared& shared = *static_cast<Shared*>(pointer);
    for (int64_t part; (part = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.parts;) {
        shared.work(shared.context, part);
    }
}

}  // namespace

void share(int64_t parts, Work work, void* context) {
    Shared shared{work, context, parts};
    if (parts <= 1) {
        take_parts(&shared);
    } else if (gomp_parallel) {
        gomp_parallel(take_parts, &shared, static_cast<unsigned>(parts), 0);
    } else {
        std::vector<std::thread> helpers;
        try {
            while (static_cast<int64_t>(helpers.size()) + 1 < parts) helpers.emplace_back(take_parts, &shared);
        } catch (const std::system_error&) {  // no more threads available: continue with those started
        }
        take_parts(&shared);
        for (std::thread& helper : helpers) helper.join();
    }
}

}  // namespace dgc

// Use the OpenMP runtime whose GOMP_parallel is at `address`; 0: start threads when needed.
DGC_API void dgc_use_openmp(void* address) { dgc::gomp_parallel = reinterpret_cast<dgc::GompParallel>(address); }
