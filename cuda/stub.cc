// The CUDA backend of a build without CUDA.
#include <stdexcept>

#include "cuda/backend.h"

namespace fp4linear::cuda {

namespace {

constexpr const char* no_cuda =
    "this build of fp4linear has no CUDA; install it with FP4LINEAR_CUDA=on in the environment to build it in";

}  // namespace

bool built() { return false; }
std::string architectures() { return {}; }
std::string build_info() { return no_cuda; }

int device_count() { return 0; }
std::string no_device_reason() { return no_cuda; }

DeviceInfo device_info(int /*device*/) { throw std::runtime_error(no_cuda); }

void dequantize(const DequantizeArguments& /*weight*/, DType /*out_dtype*/, void* /*out*/, void* /*stream*/) {
    throw std::runtime_error(no_cuda);
}

void dequantize_host(const DequantizeArguments& /*weight*/, DType /*out_dtype*/, void* /*out*/, int /*device*/) {
    throw std::runtime_error(no_cuda);
}

}  // namespace fp4linear::cuda
