// parallel_for (cpu.h) with a callable. The pool itself is in thread_pool.cc.
#pragma once
#include <cstdint>
#include <type_traits>

#include "cpu/cpu.h"

namespace fp4linear::cpu {

using RangeBody = void (*)(void* context, std::int64_t begin, std::int64_t end);

template <class Body>
void parallel_ranges(std::int64_t count, int threads, Body&& body) {
    using Callable = std::remove_reference_t<Body>;
    parallel_for(
        count, threads,
        [](void* context, std::int64_t begin, std::int64_t end) { (*static_cast<Callable*>(context))(begin, end); },
        const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace fp4linear::cpu
