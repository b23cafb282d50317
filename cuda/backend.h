// The CUDA backend as the core sees it: no CUDA headers, no #ifdefs. stub.cc defines the same functions
// in a build without CUDA.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "dtype.h"

namespace fp4linear::cuda {

bool built();                 // does this build hold kernels?
std::string architectures();  // their CMake names, "90a-real 100-virtual"; empty in the stub
std::string build_info();     // one line: the toolkit and the architectures, or why there are none

// Devices that this build can use. 0 without a driver, with one that is too old, and without a GPU; never
// throws and makes no context. It initialises the driver, which does not survive fork, so nothing calls it
// at import.
int device_count();
std::string no_device_reason();  // why device_count() is 0; empty where it is not

struct DeviceInfo {
    std::string name;
    int sm = 0;  // 10 * major + minor of the compute capability
    int sm_count = 0;
    std::size_t memory = 0;  // bytes
};
DeviceInfo device_info(int device);  // makes no context; throws std::runtime_error

// A canonical NVFP4 weight: two E2M1 codes a byte, the low nibble first, and raw E4M3 scales.
struct DequantizeArguments {
    std::int64_t n = 0;
    std::int64_t k = 0;  // even
    int block_size = 16;
    const std::uint8_t* b = nullptr;       // [n, k/2]
    const std::uint8_t* scales = nullptr;  // [n, ceil(k/block_size)]
    const float* scale2 = nullptr;         // one factor, n of them where per_row, or null for none
    bool per_row = false;
};

// out [n, k] = e2m1 * e4m3 * scale2, rounded to fp32 and then to the type of out. e2m1 * e4m3 alone (no scale2) is
// exact in all three types. Device pointers; asynchronous on the stream (a cudaStream_t) of the current device.
void dequantize(const DequantizeArguments& weight, DType out_dtype, void* out, void* stream);

// The same for host pointers: uploads, runs on the device, downloads, and leaves the current device as it was.
void dequantize_host(const DequantizeArguments& weight, DType out_dtype, void* out, int device);

// What this build has for native_nvfp4 on a GPU of a compute capability (10 * major + minor), asked of CUTLASS on the
// host: no GPU is needed.
struct NativeCheck {
    bool built = false;
    std::string reason;  // why not, or why CUTLASS can't take the shape; empty where it can
    int tile_m = 0, tile_n = 0, tile_k = 0, cluster_m = 0;
    std::size_t workspace = 0;  // bytes
};
NativeCheck check_native(int sm, std::int64_t m, std::int64_t n, std::int64_t k, DType dtype);

}  // namespace fp4linear::cuda
