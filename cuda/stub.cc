// The CUDA backend of a build without CUDA.
#include <stdexcept>

#include "cuda/backend.h"
#include "cuda/borrowed.h"
#include "cuda/weight.h"

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

NativeCheck check_native(int /*sm*/, std::int64_t /*m*/, std::int64_t /*n*/, std::int64_t /*k*/, DType /*dtype*/) {
    NativeCheck check;
    check.reason = no_cuda;
    return check;
}

// Nothing below is reached: no layer gets onto a device that device_count() denies.
WeightForm choose_form(std::int64_t /*k*/, int /*block_size*/, bool /*has_nan_scales*/, const DeviceSpec& /*device*/,
                       const Options& /*options*/) {
    throw std::runtime_error(no_cuda);
}
bool wants_native(std::int64_t /*n*/, std::int64_t /*k*/, int /*block_size*/, const DeviceSpec& /*device*/,
                  const Options& /*options*/) {
    throw std::runtime_error(no_cuda);
}
void native_weight_host(const std::uint8_t* /*b*/, const std::uint8_t* /*scales*/, std::int64_t /*n*/,
                        std::int64_t /*k*/, bool /*by_prepacked*/, std::uint8_t* /*codes*/, std::uint8_t* /*swizzled*/,
                        int /*device*/) {
    throw std::runtime_error(no_cuda);
}
std::unique_ptr<Weight> make_weight(const WeightArguments& /*arguments*/) { throw std::runtime_error(no_cuda); }
DeviceSpec device_spec(int /*device*/) { throw std::runtime_error(no_cuda); }
void run(PathId /*path*/, const Weight& /*weight*/, const Problem& /*problem*/, const CallOptions& /*options*/,
         void* /*stream*/) {
    throw std::runtime_error(no_cuda);
}
void dequantize_rows(const Weight& /*weight*/, std::int64_t /*first*/, std::int64_t /*count*/, DType /*dtype*/,
                     void* /*out*/, float* /*scale2*/, void* /*stream*/) {
    throw std::runtime_error(no_cuda);
}
void fill_with_bias(const Weight& /*weight*/, const Problem& /*problem*/, void* /*stream*/) {
    throw std::runtime_error(no_cuda);
}
void run(PathId /*path*/, const BorrowedWeight& /*weight*/, const Problem& /*problem*/, const CallOptions& /*options*/,
         void* /*stream*/) {
    throw std::runtime_error(no_cuda);
}
void fill_with_bias(const BorrowedWeight& /*weight*/, const Problem& /*problem*/, void* /*stream*/) {
    throw std::runtime_error(no_cuda);
}
void quantize_activations(const Problem& /*problem*/, float /*global_scale*/, ScaleLayout /*layout*/,
                          std::uint8_t* /*codes*/, std::uint8_t* /*scales*/, float* /*global_scale_out*/,
                          void* /*stream*/) {
    throw std::runtime_error(no_cuda);
}
void prepare_device(int /*device*/) { throw std::runtime_error(no_cuda); }
void gather(void* /*to*/, const void* /*from*/, int /*ndim*/, const std::int64_t* /*shape*/,
            const std::int64_t* /*strides*/, void* /*stream*/) {
    throw std::runtime_error(no_cuda);
}
int current_device() { throw std::runtime_error(no_cuda); }
CurrentDevice::CurrentDevice(int /*device*/) { throw std::runtime_error(no_cuda); }
CurrentDevice::~CurrentDevice() = default;
void* own_stream(int /*device*/) { throw std::runtime_error(no_cuda); }
void order(void* /*earlier*/, void* /*later*/) { throw std::runtime_error(no_cuda); }
void* allocate(std::size_t /*bytes*/, void* /*stream*/) { throw std::runtime_error(no_cuda); }
void release(void* /*memory*/, void* /*stream*/) noexcept {}
void call_when_reached(void* /*stream*/, void (* /*function*/)(void*), void* /*argument*/) {
    throw std::runtime_error(no_cuda);
}
bool cublaslt_available() { return false; }
void copy(void* /*to*/, const void* /*from*/, std::size_t /*bytes*/) { throw std::runtime_error(no_cuda); }

}  // namespace fp4linear::cuda
