// The memory limit that a call with cold weights is measured against.
#pragma once
#include <cstddef>

namespace fp4linear::cpu {

// Bytes per second of the best of `repeats` read-only sweeps over a buffer of `bytes`, each thread reading its
// own contiguous part. A buffer far larger than the last-level cache measures memory.
double read_bandwidth(std::size_t bytes, int threads, int repeats);

}  // namespace fp4linear::cpu
