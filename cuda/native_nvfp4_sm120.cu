// native_nvfp4 on 12.0 and 12.1: mma.sync with block scales (OMMA.SF). Compiled for the family sm_120f alone: for plain
// sm_120 CUTLASS gives a kernel without one multiplication in it.
#include "cuda/device/native_nvfp4.cuh"

#if defined(__CUDA_ARCH__) && !defined(CUTLASS_ARCH_MMA_SM120F_ENABLED) && !defined(CUTLASS_ARCH_MMA_SM120A_ENABLED)
#error "compile native_nvfp4_sm120.cu for sm_120f or sm_120a"
#endif

namespace fp4linear::cuda {
namespace {

using namespace device::native;
using cute::_1, cute::_128, cute::_256;
using cute::Shape;

using Small = Kernel<cutlass::arch::Sm120, Shape<_128, _128, _128>, Shape<_1, _1, _1>>;
using Large = Kernel<cutlass::arch::Sm120, Shape<_256, _128, _128>, Shape<_1, _1, _1>>;
// Estimated, not measured: from two small tiles of tokens on, the weight is read and its scales are loaded half as
// often.
constexpr std::int64_t most_rows_of_small = 256;

}  // namespace

NativeKernels native_kernels_sm120() { return Family<Small, Large, most_rows_of_small>::kernels("sm120"); }

}  // namespace fp4linear::cuda
