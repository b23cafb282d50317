// native_nvfp4 on 10.0 and 10.3: tcgen05.mma with block scales (UTCOMMA), accumulators in tensor memory. Compiled for
// the family sm_100f alone.
#include "cuda/device/native_nvfp4.cuh"

#if defined(__CUDA_ARCH__) && !defined(CUTLASS_ARCH_MMA_SM100F_ENABLED) && !defined(CUTLASS_ARCH_MMA_SM100A_ENABLED)
#error "compile native_nvfp4_sm100.cu for sm_100f or sm_100a"
#endif

namespace fp4linear::cuda {
namespace {

using namespace device::native;
using cute::_1, cute::_2, cute::_128, cute::_256;
using cute::Shape;

using Small = Kernel<cutlass::arch::Sm100, Shape<_128, _128, _256>, Shape<_1, _1, _1>>;
// Two SMs a tile.
using Large = Kernel<cutlass::arch::Sm100, Shape<_256, _128, _256>, Shape<_2, _1, _1>, Shape<_128, _128, _256>>;
// Estimated, not measured: one tile of the two-SM kernel.
constexpr std::int64_t most_rows_of_small = 128;

}  // namespace

NativeKernels native_kernels_sm100() { return Family<Small, Large, most_rows_of_small>::kernels("sm100"); }

}  // namespace fp4linear::cuda
