// The 64 scale bytes of a step as four vectors of fp32, times 2^-8 (layout.h).
#pragma once
#include <immintrin.h>

#include "cpu/layout.h"

namespace fp4linear::cpu {
namespace {

// A word holds two E4M3 bytes, a group in each. E4M3's exponent and mantissa, moved to bits 13..7, are a half with the
// value times 2^-8; vcvtph2ps normalises subnormals whatever the flush modes.
inline __m512 widen_scales(__m256i words, __m256i halves, int shift_sign, bool plain) {
    if (!plain) {
        const __m256i sign =
            _mm256_and_si256(_mm256_slli_epi16(words, shift_sign), _mm256_set1_epi16(static_cast<short>(0x8000)));
        // 0x7F and 0xFF are NaN.
        const __m256i nan =
            _mm256_and_si256(_mm256_cmpeq_epi16(halves, _mm256_set1_epi16(0x3F80)), _mm256_set1_epi16(0x7E00));
        halves = _mm256_or_si256(_mm256_or_si256(halves, sign), nan);
    }
    return _mm512_cvtph_ps(halves);
}

inline void decode_scales(const std::uint8_t* bytes, bool plain, __m512* scale) {
    const __m256i field = _mm256_set1_epi16(0x3F80);
    FP4LINEAR_UNROLL
    for (int h = 0; h < 2; ++h) {
        const __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes + 32 * h));
        const __m256i even = _mm256_and_si256(_mm256_slli_epi16(words, 7), field);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(words, 1), field);
        scale[2 * h] = widen_scales(words, even, 8, plain);
        scale[2 * h + 1] = widen_scales(words, odd, 0, plain);
    }
}

}  // namespace
}  // namespace fp4linear::cpu
