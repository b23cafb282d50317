// How the weight lies in memory, re-tiled once at construction.
//
// Tile: 16 output rows x the whole of K, one contiguous stream, so that a thread reads its rows as one stream.
// Step: 16 rows x 64 K of a tile in 576 contiguous bytes (nine cache lines):
//   512 bytes of codes: vector v (64 bytes) holds k = 8v .. 8v+7; its 32-bit lane r belongs to row r. Inside a
//     lane nibble j of the low half is k = 8v + 2j and nibble j of the high half is k = 8v + 2j + 1, so that one
//     16-bit table lookup of (lane >> 4j) gives the pair of weights that a bf16 dot product eats.
//   64 bytes of scales: 32 16-bit words; word 16h + r is row r's block 2h (low byte) and block 2h + 1 (high byte).
// K is padded to 64 with zero codes and zero scales, the rows to 16.
#pragma once
#include <cstddef>
#include <cstdint>

// Before a loop of a constant count whose body indexes an array of vector registers: it has to be unrolled wholly, or
// the array lives in memory. No such loop here has more than 16 iterations.
#if defined(__clang__)
#define FP4LINEAR_UNROLL _Pragma("unroll")
#else
#define FP4LINEAR_UNROLL _Pragma("GCC unroll 16")
#endif

namespace fp4linear::cpu {

inline constexpr int tile_rows = 16;
inline constexpr int step_k = 64;
inline constexpr int group_k = 16;  // K elements that share a scale in the tiled layout
inline constexpr int step_groups = step_k / group_k;
inline constexpr int step_code_bytes = tile_rows * step_k / 2;
inline constexpr int step_scale_bytes = tile_rows * step_groups;
inline constexpr int step_bytes = step_code_bytes + step_scale_bytes;

// The kernels decode a scale byte as the bits of a half, whose exponent bias is 15 and not 7: every sum
// that they return is 2^-8 of the true one. The epilogue multiplies by this, exactly.
inline constexpr double sum_factor = 0x1p8;

}  // namespace fp4linear::cpu
