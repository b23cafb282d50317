// Element types of activations, outputs and bias.
#pragma once
#include <cstddef>
#include <cstdint>

namespace fp4linear {

enum class DType : std::uint8_t { float16, bfloat16, float32 };

constexpr std::size_t size_of(DType t) { return t == DType::float32 ? 4 : 2; }

constexpr const char* name_of(DType t) {
    switch (t) {
        case DType::float16: return "float16";
        case DType::bfloat16: return "bfloat16";
        case DType::float32: return "float32";
    }
    return "?";
}

}  // namespace fp4linear
