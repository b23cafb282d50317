// What this build holds.
#include <cuda_runtime_api.h>

#include <string>

#include "cuda/backend.h"

namespace fp4linear::cuda {

bool built() { return true; }
std::string architectures() { return FP4LINEAR_CUDA_TARGETS; }

std::string build_info() {
    return "CUDA " + std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10) +
           ", architectures " + architectures();
}

}  // namespace fp4linear::cuda
