// The PTX of the SM90 GEMM: warpgroup mma with a register A operand, tensor copies, stmatrix.
#pragma once
#include <cstdint>

#include "cuda/device/fp4.cuh"

namespace fp4linear::cuda::device {

// A B operand in shared memory, [tokens][64 K], K contiguous, 128-byte swizzle, 1024-byte aligned [wgmma: matrix
// descriptor]: 8 tokens are 1024 bytes; the leading offset is not used. Adding 2 is 16 K further on.
__device__ __forceinline__ std::uint64_t b_descriptor(std::uint32_t address) {
    constexpr std::uint64_t swizzle_128 = std::uint64_t{1} << 62;
    constexpr std::uint64_t stride_1024 = std::uint64_t{1024 >> 4} << 32;
    return swizzle_128 | stride_1024 | std::uint64_t{1} << 16 | (address & 0x3FFFFu) >> 4;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int Registers>
__device__ __forceinline__ void claim_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// [fence.proxy.async] Ordinary stores to shared memory before it are seen by wgmma.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The registers of A and D are set.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// D[64 x Tokens] += A[64 x 16] B[16 x Tokens]. D: lane (g, t) of warp w has rows 16 w + g and 8 more, and of every 8
// tokens 2 t and 2 t + 1.
#define FP4LINEAR_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FP4LINEAR_D12 FP4LINEAR_D8 ", %8, %9, %10, %11"
#define FP4LINEAR_D16 FP4LINEAR_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FP4LINEAR_D24 FP4LINEAR_D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FP4LINEAR_D32 FP4LINEAR_D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FP4LINEAR_D48                                                        \
    FP4LINEAR_D32                                                            \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45" \
    ", %46, %47"
#define FP4LINEAR_D64                                                        \
    FP4LINEAR_D48                                                            \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61" \
    ", %62, %63"
#define FP4LINEAR_D96                                                                            \
    FP4LINEAR_D64                                                                                \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81" \
    ", %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FP4LINEAR_D128                                                                           \
    FP4LINEAR_D96                                                                                \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110"     \
    ", %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125" \
    ", %126, %127"
#define FP4LINEAR_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FP4LINEAR_F8(i)                                                                                         \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define FP4LINEAR_F16(i) FP4LINEAR_F8(i), FP4LINEAR_F8(i + 8)
#define FP4LINEAR_F32(i) FP4LINEAR_F16(i), FP4LINEAR_F16(i + 16)
#define FP4LINEAR_F64(i) FP4LINEAR_F32(i), FP4LINEAR_F32(i + 32)
#define FP4LINEAR_WGMMA(tokens, type, list, a0, a1, a2, a3, b, ...)                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32." type "." type " {" list "}, {%" #a0 ", %" #a1 \
                 ", %" #a2 ", %" #a3 "}, %" #b ", 1, 1, 1, 0;"                                                        \
                 : __VA_ARGS__                                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_operand)                                         \
                 : "memory")
#define FP4LINEAR_WGMMA_TOKENS(type)                                                                         \
    if constexpr (Tokens == 16)                                                                              \
        FP4LINEAR_WGMMA(16, type, FP4LINEAR_D8, 8, 9, 10, 11, 12, FP4LINEAR_F8(0));                          \
    else if constexpr (Tokens == 24)                                                                         \
        FP4LINEAR_WGMMA(24, type, FP4LINEAR_D12, 12, 13, 14, 15, 16, FP4LINEAR_F8(0), FP4LINEAR_F4(8));      \
    else if constexpr (Tokens == 32)                                                                         \
        FP4LINEAR_WGMMA(32, type, FP4LINEAR_D16, 16, 17, 18, 19, 20, FP4LINEAR_F16(0));                      \
    else if constexpr (Tokens == 48)                                                                         \
        FP4LINEAR_WGMMA(48, type, FP4LINEAR_D24, 24, 25, 26, 27, 28, FP4LINEAR_F16(0), FP4LINEAR_F8(16));    \
    else if constexpr (Tokens == 64)                                                                         \
        FP4LINEAR_WGMMA(64, type, FP4LINEAR_D32, 32, 33, 34, 35, 36, FP4LINEAR_F32(0));                      \
    else if constexpr (Tokens == 96)                                                                         \
        FP4LINEAR_WGMMA(96, type, FP4LINEAR_D48, 48, 49, 50, 51, 52, FP4LINEAR_F32(0), FP4LINEAR_F16(32));   \
    else if constexpr (Tokens == 128)                                                                        \
        FP4LINEAR_WGMMA(128, type, FP4LINEAR_D64, 64, 65, 66, 67, 68, FP4LINEAR_F64(0));                     \
    else if constexpr (Tokens == 192)                                                                        \
        FP4LINEAR_WGMMA(192, type, FP4LINEAR_D96, 96, 97, 98, 99, 100, FP4LINEAR_F64(0), FP4LINEAR_F32(64)); \
    else                                                                                                     \
        FP4LINEAR_WGMMA(256, type, FP4LINEAR_D128, 128, 129, 130, 131, 132, FP4LINEAR_F64(0), FP4LINEAR_F64(64))

template <int Tokens>
__device__ __forceinline__ void wgmma(BFloat16, float (&d)[Tokens / 2], const std::uint32_t (&a)[4],
                                      std::uint64_t b_operand) {
    FP4LINEAR_WGMMA_TOKENS("bf16");
}
template <int Tokens>
__device__ __forceinline__ void wgmma(Float16, float (&d)[Tokens / 2], const std::uint32_t (&a)[4],
                                      std::uint64_t b_operand) {
    FP4LINEAR_WGMMA_TOKENS("f16");
}
#endif

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void store_release(std::uint32_t* p, std::uint32_t v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ std::uint32_t load_acquire(const std::uint32_t* p) {
    std::uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// [cp.async.bulk.tensor] A box at (c0, c1) of a tensor map to shared memory; what lies outside the tensor arrives as
// zeros.
__device__ __forceinline__ void tensor_copy(std::uint32_t destination, const void* map, int c0, int c1,
                                            std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            destination),
        "l"(map), "r"(c0), "r"(c1), "r"(barrier)
        : "memory");
}
// The same to both blocks of a cluster: to the same place, announced to the barrier at the same place.
__device__ __forceinline__ void tensor_copy_to_both(std::uint32_t destination, const void* map, int c0, int c1,
                                                    std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
        "{%2, %3}], [%4], %5;" ::"r"(destination),
        "l"(map), "r"(c0), "r"(c1), "r"(barrier), "h"(static_cast<std::uint16_t>(3))
        : "memory");
}
// [mbarrier.arrive] At a barrier of any block of the cluster.
__device__ __forceinline__ void mbarrier_arrive_in_cluster(std::uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Four 8x8 matrices, each transposed on its way: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4_transposed(std::uint32_t address, std::uint32_t v0, std::uint32_t v1,
                                                           std::uint32_t v2, std::uint32_t v3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v0),
                 "r"(v1), "r"(v2), "r"(v3)
                 : "memory");
}
#endif

// Two floats to a pair, the first in the low half.
__device__ __forceinline__ std::uint32_t pack(BFloat16, float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
}
__device__ __forceinline__ std::uint32_t pack(Float16, float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
}

}  // namespace fp4linear::cuda::device
