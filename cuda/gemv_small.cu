// gemv_tensor_core for layers so small that latency is all: a chain of them is bound by what happens between the end of
// the previous kernel, which gives x, and the store of y.
//
// So everything else happens before. A block has one tile of 16 outputs, a warp two or four units of 16 x 64 weights,
// which it has read and decoded into complete mma operands by the time x may be read; the hardware lets several kernels
// of a chain get that far. What is left is x -> operands -> mma -> one reduction -> y. Every M from 1 to 8 takes the
// same path, and beyond it further rows of blocks take 8 tokens each: they decode the weight again, in time that nobody
// waits for. (Blocks of 16 and 32 tokens were slower up to M = 32.)
//
// Range: the weights are w * 2^10 (bf16) or w * 2^-14 (fp16), both exact, and x is as it is. A sum that leaves the fp32
// range while x is finite is computed again in fp64.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/device/fp4.cuh"
#include "cuda/device/gemv.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/gemm.h"
#include "cuda/gemv_parameters.h"
#include "cuda/launch.h"
#include "cuda/prepacked.h"

namespace fp4linear::cuda {
namespace {

using namespace device;
using prepacked::unit_bytes;
using prepacked::unit_code_bytes;
using prepacked::unit_k;
using prepacked::unit_rows;

constexpr int warps_an_sm = 16;   // with 128 registers a thread
constexpr int block_tokens = 8;   // the n of mma.m16n8k16
constexpr int x_row_pitch = 144;  // bytes of a staged row of 64 K: 128 + 16, so that ldmatrix meets no bank conflict
constexpr int x_unit_bytes = 8 * x_row_pitch;
constexpr int token_pitch = 20;  // floats of a token's 16 partial sums: the stores of a warp meet no bank conflict
constexpr int partial_floats = 8 * token_pitch;

__device__ __forceinline__ std::uint32_t lift_code(std::uint32_t pair, BFloat16) {
    return BFloat16::multiply(pair, 0x48004800u /* 2^17: with the 2^-7 of code * scale, 2^10 */);
}
__device__ __forceinline__ std::uint32_t lift_code(std::uint32_t pair, Float16) { return pair; }

__device__ __forceinline__ uint4 load_weight_128(const std::uint8_t* source) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(source));
    return v;
}
__device__ __forceinline__ uint2 load_weight_64(const std::uint8_t* source) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(source));
    return v;
}

// The A operands of a unit.
template <class T>
__device__ __forceinline__ void decode_unit(const uint4& codes, const uint2& scales, std::uint32_t (&a)[4][4]) {
    const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int two = 0; two < 2; ++two) {
        const std::uint32_t upper = T::scale_pair(two == 0 ? scales.x : scales.y, 0);
        const std::uint32_t lower = T::scale_pair(two == 0 ? scales.x : scales.y, 1);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            std::uint32_t (&out)[4] = a[2 * two + i];
            const std::uint32_t scale_g = twice(upper, i != 0);
            const std::uint32_t scale_g8 = twice(lower, i != 0);
            T::decode(words[2 * two + i], out);
            out[0] = T::multiply(lift_code(out[0], T{}), scale_g);
            out[1] = T::multiply(lift_code(out[1], T{}), scale_g8);
            out[2] = T::multiply(lift_code(out[2], T{}), scale_g);
            out[3] = T::multiply(lift_code(out[3], T{}), scale_g8);
        }
    }
}

template <class T, int Units, int Warps>
__global__ void __launch_bounds__(Warps * 32, warps_an_sm / Warps)
    small_kernel(const __grid_constant__ GemvParameters p) {
#if __CUDA_ARCH__ >= 800
    // Of a warp: its x, then its sums.
    extern __shared__ __align__(128) std::uint8_t shared[];
    constexpr int staging_bytes = Units * x_unit_bytes;
    static_assert(partial_floats * sizeof(float) <= staging_bytes);
    launch_dependents();
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0);
    const std::uint32_t stage = shared_address(shared) + warp * staging_bytes;
    const int first_unit = warp * Units;
    const int first_token = static_cast<int>(blockIdx.y) * block_tokens;
    const int tokens = min(block_tokens, p.m - first_token);

    // The weight is the layer's own and finished long ago: its reads need not wait for the previous kernel.
    const std::uint8_t* unit = p.weight + (static_cast<std::int64_t>(blockIdx.x) * p.k_units + first_unit) * unit_bytes;
    uint4 codes[Units];
    uint2 scales[Units];
#pragma unroll
    for (int u = 0; u < Units; ++u) {
        codes[u] = make_uint4(0, 0, 0, 0);
        scales[u] = make_uint2(0, 0);
        if (first_unit + u < p.k_units) {
            codes[u] = load_weight_128(unit + u * unit_bytes + lane * 16);
            scales[u] = load_weight_64(unit + u * unit_bytes + unit_code_bytes + lane / 4 * 8);
        }
    }
    if (tokens <= 4)  // the other four are zero
#pragma unroll
        for (int u = 0; u < Units; ++u)
            store_shared_128(stage + u * x_unit_bytes + (4 + lane / 8) * x_row_pitch + lane % 8 * 16,
                             make_uint4(0, 0, 0, 0));
    std::uint32_t a[Units][4][4];
#pragma unroll
    for (int u = 0; u < Units; ++u) decode_unit<T>(codes[u], scales[u], a[u]);

    // A lane reads 16 bytes of a token, of four tokens at once, then of the other four.
    const std::uint16_t* const x = p.x + (first_token + lane / 8) * p.x_row_stride + first_unit * unit_k + lane % 8 * 8;
    const std::uint16_t* const x4 = x + 4 * p.x_row_stride;
    const bool first_four = lane / 8 < tokens;
    const bool last_four = lane / 8 + 4 < tokens;
    // The thread's output, in the end: token * 16 + row.
    const int output = threadIdx.x;
    const int outputs = unit_rows * tokens;
    const int token = output / unit_rows;
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * unit_rows + output % unit_rows;
    const bool stores = output < outputs && row < p.n;
    {
        // The compiler would move all this behind the wait, were it not stored before: into the rows' padding.
        std::uint32_t all = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(x)) ^
                            static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(x4));
#pragma unroll
        for (int u = 0; u < Units; ++u)
#pragma unroll
            for (int s = 0; s < 4; ++s) all ^= a[u][s][0] ^ a[u][s][1] ^ a[u][s][2] ^ a[u][s][3];
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(stage + lane / 4 * x_row_pitch + 128 + lane % 4 * 4), "r"(all)
                     : "memory");
    }
    wait_for_previous_grid();

    uint4 rows[Units][2];
    if (p.x_aligned) {
#pragma unroll
        for (int u = 0; u < Units; ++u) {
            const bool inside = first_unit + u < p.k_units;
            rows[u][0] = rows[u][1] = make_uint4(0, 0, 0, 0);
            if (first_four && inside) rows[u][0] = *reinterpret_cast<const uint4*>(x + u * unit_k);
            if (last_four && inside) rows[u][1] = *reinterpret_cast<const uint4*>(x4 + u * unit_k);
        }
    }
    const float scale2 = stores ? scale2_of(p, row) : 0.0f;
    const float bias = stores ? bias_of(p, row) : 0.0f;
    uint2 b[Units][4];
    if (p.x_aligned) {
#pragma unroll
        for (int u = 0; u < Units; ++u) {
            const std::uint32_t to = stage + u * x_unit_bytes + lane / 8 * x_row_pitch + lane % 8 * 16;
            store_shared_128(to, rows[u][0]);
            if (tokens > 4) store_shared_128(to + 4 * x_row_pitch, rows[u][1]);
        }
        __syncwarp();
#pragma unroll
        for (int u = 0; u < Units; ++u)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4 two_slices =
                    load_matrix_x4(stage + u * x_unit_bytes + lane % 8 * x_row_pitch + (4 * i + lane / 8) * 16);
                b[u][2 * i] = make_uint2(two_slices.x, two_slices.y);
                b[u][2 * i + 1] = make_uint2(two_slices.z, two_slices.w);
            }
    } else {
#pragma unroll
        for (int u = 0; u < Units; ++u)
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                b[u][s] = make_uint2(0, 0);
                if (lane / 4 < tokens && first_unit + u < p.k_units) {
                    const std::uint16_t* source = p.x + (first_token + lane / 4) * p.x_row_stride +
                                                  (first_unit + u) * unit_k + s * prepacked::slice_k + lane % 4 * 2;
                    b[u][s].x = source[0] | static_cast<std::uint32_t>(source[1]) << 16;
                    b[u][s].y = source[8] | static_cast<std::uint32_t>(source[9]) << 16;
                }
            }
    }

    float sums[4][4] = {};  // four chains: the latency of mma counts
#pragma unroll
    for (int u = 0; u < Units; ++u)
#pragma unroll
        for (int s = 0; s < 4; ++s) T::mma(sums[s], a[u][s], b[u][s].x, b[u][s].y);
    __syncwarp();
    float* const mine = reinterpret_cast<float*>(shared + warp * staging_bytes) + lane % 4 * 2 * token_pitch + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        mine[i % 2 * token_pitch + i / 2 * 8] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    __syncthreads();
    if (output / 32 * 32 >= outputs) return;
    float values[Warps];
#pragma unroll
    for (int w = 0; w < Warps; ++w)
        values[w] =
            reinterpret_cast<const float*>(shared + w * staging_bytes)[token * token_pitch + output % unit_rows];
#pragma unroll
    for (int step = 1; step < Warps; step *= 2)
#pragma unroll
        for (int w = 0; w + step < Warps; w += 2 * step) values[w] += values[w + step];
    if (stores) p.y[(first_token + token) * p.n + row] = epilogue<T>(scale2, bias, values[0]);
    if constexpr (sum_exponent<T> > 0) {
        __syncwarp();
        const int first_stored = first_token + output / 32 * 2;  // a warp has two tokens
        if (__any_sync(0xFFFFFFFFu, stores && !is_finite(values[0])))
            repair_tokens<T>(p, blockIdx.x, first_stored, first_stored + 2);
    }
#endif
}

template <class T, int Units, int Warps>
cudaError_t launch(const GemvParameters& p, const SmallConfiguration& c, const GemvArguments& a) {
    if (p.k_units > Units * Warps) return cudaErrorInvalidConfiguration;
    constexpr auto* kernel = small_kernel<T, Units, Warps>;
    std::size_t shared = Warps * Units * x_unit_bytes;
    const bool overlaps = a.programmatic_launch && a.kernel_arch >= 90;
    if (overlaps) {
        // With room for more blocks an SM gets several of one kernel while others get none.
        constexpr int reserved = 1024;  // bytes of shared memory that a block takes beside its own
        const int room = (a.max_shared_memory + reserved) / std::max(2, c.resident) - reserved;
        shared = std::max(shared, static_cast<std::size_t>(std::max(room, 0) & ~127));
    }
    if (shared > static_cast<std::size_t>(a.max_shared_memory)) return cudaErrorInvalidConfiguration;
    if (const cudaError_t e = allow_shared_memory<kernel>(a.max_shared_memory)) return e;
    const dim3 grid(static_cast<unsigned>(p.tiles), static_cast<unsigned>((p.m + block_tokens - 1) / block_tokens));
    Launch launch(grid, dim3(Warps * 32), shared, a.stream);
    if (overlaps) launch.overlap_previous();
    return launch.run(kernel, p);
}

template <class T>
cudaError_t launch_configured(const GemvParameters& p, const SmallConfiguration& c, const GemvArguments& a) {
    const auto is = [&](int units, int warps) { return c.units == units && c.warps == warps; };
    if (is(2, 4)) return launch<T, 2, 4>(p, c, a);
    if (is(2, 8)) return launch<T, 2, 8>(p, c, a);
    if (is(2, 16)) return launch<T, 2, 16>(p, c, a);
    if (is(4, 4)) return launch<T, 4, 4>(p, c, a);
    if (is(4, 8)) return launch<T, 4, 8>(p, c, a);
    if (is(4, 16)) return launch<T, 4, 16>(p, c, a);
    return cudaErrorInvalidConfiguration;
}

}  // namespace

// Measured on one H200 (docs/performance.md): at least two blocks of a wave an SM, so that the next kernel's wait
// there.
bool configure_small(const GemvParameters& p, int sm_count, SmallConfiguration& c) {
    const int waves = (p.tiles + sm_count - 1) / sm_count;
    if (p.k_units <= 8 && waves <= 8)
        c = {2, 4, 2 * waves};
    else if (p.k_units <= 16 && waves == 1)
        c = {2, 8, 2};
    else if (p.k_units <= 16 && waves <= 6)
        c = {4, 4, 4};
    else if (p.k_units <= 32 && p.tiles * 2 <= sm_count)
        c = {2, 16, 2};
    else if (p.k_units <= 32 && waves <= (p.m == 1 ? 2 : 4))
        c = {4, 8, 2};
    else if (p.k_units <= 64 && waves == 1)
        c = {4, 16, 2};
    else
        return false;
    return true;
}

cudaError_t gemv_small(const GemvParameters& p, const SmallConfiguration& c, const GemvArguments& a) {
    return a.dtype == DType::float16 ? launch_configured<Float16>(p, c, a) : launch_configured<BFloat16>(p, c, a);
}

// Measured on one H200: as long as all blocks run at once, reading the weight once more a block row is the faster way.
bool gemm_small_supports(const GemmArguments& a) {
    SmallConfiguration c{};
    const GemvParameters p = gemv_parameters(a);
    if (a.kernel_arch < 80 || !configure_small(p, a.sm_count, c)) return false;
    const std::int64_t blocks = p.tiles * ((a.m + block_tokens - 1) / block_tokens);
    return blocks <= std::int64_t{a.sm_count} * (warps_an_sm / c.warps);
}

cudaError_t gemm_small(const GemmArguments& a) {
    const GemvParameters p = gemv_parameters(a);
    SmallConfiguration c{};
    if (!configure_small(p, a.sm_count, c)) return cudaErrorInvalidConfiguration;
    GemvArguments launch;
    launch.dtype = a.dtype;
    launch.max_shared_memory = a.max_shared_memory;
    launch.kernel_arch = a.kernel_arch;
    launch.programmatic_launch = a.programmatic_launch;
    launch.stream = a.stream;
    return gemv_small(p, c, launch);
}

}  // namespace fp4linear::cuda
