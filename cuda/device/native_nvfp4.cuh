// native_nvfp4 in terms of CUTLASS 4: collectives, epilogue, and the functions of NativeKernels for a family of GPUs.
//
// A is x [M, K], B the weight [N, K], both packed two codes a byte; scales are in the 128x4 layout of both. The sums
// are fp32 in the tensor cores; the epilogue computes fma(scale2[n] / g, sum, bias[n]) in fp32 and rounds once.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/operations.hpp>
#include <cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/kernel_hardware_info.h>
#include <cutlass/numeric_types.h>

#include <algorithm>
#include <limits>

#include "cuda/native_kernels.h"

namespace fp4linear::cuda::device::native {

namespace fusion = cutlass::epilogue::fusion;
using cutlass::epilogue::collective::EpilogueTileAuto;
using fusion::Sm90AccFetch;
using fusion::Sm90Compute;
using fusion::Sm90EVT;

inline constexpr int code_alignment = 32;  // codes of 4 bits: 16 bytes, what TMA wants
inline constexpr int y_alignment = 8;

// A matrix whose rows are contiguous, so many elements apart; one batch.
template <class Stride>
Stride rows_apart(std::int64_t elements) {
    Stride stride{};
    cute::get<0>(stride) = elements;
    return stride;
}

// fma(factor, sum, bias), rounded to fp16 or bf16 as the call says, so that one kernel serves both: a kernel takes a
// minute to compile. The bits of fp16 travel as a bfloat16_t, which nothing looks into any more.
using Output = cutlass::bfloat16_t;
template <class T>
struct RoundOnce {
    struct Arguments {
        bool half = false;
    };
};
template <class T, int count>
struct RoundOnce<cutlass::Array<T, count>> {
    using Arguments = typename RoundOnce<T>::Arguments;
    using Floats = cutlass::Array<float, count>;

    CUTLASS_DEVICE cutlass::Array<Output, count> operator()(const Floats& factor, const Floats& sum, const Floats& bias,
                                                            const Arguments& arguments) const {
        cutlass::Array<Output, count> y;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < count; ++i) {
            const float value = fmaf(factor[i], sum[i], bias[i]);
            y[i] = Output::bitcast(arguments.half ? __half_as_ushort(__float2half_rn(value))
                                                  : __bfloat16_as_ushort(__float2bfloat16_rn(value)));
        }
        return y;
    }
};

template <class Tile>
struct Epilogue {
    static constexpr auto rounding = cutlass::FloatRoundStyle::round_to_nearest;
    using OfColumn = fusion::Sm90RowBroadcast<0, Tile, float>;  // y's columns are the weight's rows
    using GlobalScale = fusion::Sm90ScalarBroadcast<float>;
    using Factor = Sm90EVT<Sm90Compute<cutlass::divides, float, float, rounding>, OfColumn, GlobalScale>;
    using Tree = Sm90EVT<Sm90Compute<RoundOnce, Output, float, rounding>, Factor, Sm90AccFetch, OfColumn>;

    static typename Tree::Arguments arguments(const NativeArguments& a) {
        typename OfColumn::Arguments scale2{a.scale2_rows, a.scale2, {}};
        typename OfColumn::Arguments bias{a.bias, 0.0f, {}};
        typename GlobalScale::Arguments g{{a.global_scale}, {a.global_scale_on_device}, {}};
        return {{scale2, g, {}}, {}, bias, {a.dtype == DType::float16}};
    }
};

// CtaTile: one block's part of a tile that two SMs multiply together.
template <class Arch, class Tile, class Cluster, class CtaTile = Tile>
struct Kernel {
    using Code = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
    using Rows = cutlass::layout::RowMajor;
    using Columns = cutlass::layout::ColumnMajor;
    using Fusion = Epilogue<CtaTile>;

    using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        Arch, cutlass::arch::OpClassBlockScaledTensorOp, Tile, Cluster, EpilogueTileAuto, float, float, void, Rows,
        y_alignment, Output, Rows, y_alignment, cutlass::epilogue::collective::EpilogueScheduleAuto,
        typename Fusion::Tree>::CollectiveOp;
    using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        Arch, cutlass::arch::OpClassBlockScaledTensorOp, Code, Rows, code_alignment, Code, Columns, code_alignment,
        float, Tile, Cluster,
        cutlass::gemm::collective::StageCountAutoCarveout<sizeof(typename CollectiveEpilogue::SharedStorage)>,
        cutlass::gemm::collective::KernelScheduleAuto>::CollectiveOp;
    using GemmKernel =
        cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, CollectiveMainloop, CollectiveEpilogue>;
    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<GemmKernel>;

    static typename Gemm::Arguments arguments(const NativeArguments& a) {
        using ScaleLayouts = typename CollectiveMainloop::Sm1xxBlkScaledConfig;
        using ElementCode = typename Gemm::ElementA;
        using ElementScale = cutlass::float_ue4m3_t;
        const int m = static_cast<int>(a.m), n = static_cast<int>(a.n), k = static_cast<int>(a.k);
        const auto shape = cute::make_shape(m, n, k, 1);
        typename Gemm::Arguments g{};
        g.mode = cutlass::gemm::GemmUniversalMode::kGemm;
        g.problem_shape = shape;
        g.mainloop.ptr_A = reinterpret_cast<decltype(g.mainloop.ptr_A)>(a.x_codes);
        g.mainloop.dA = rows_apart<typename GemmKernel::StrideA>(a.k);
        g.mainloop.ptr_B = reinterpret_cast<decltype(g.mainloop.ptr_B)>(a.weight_codes);
        g.mainloop.dB = rows_apart<typename GemmKernel::StrideB>(a.k);
        g.mainloop.ptr_SFA = reinterpret_cast<const ElementScale*>(a.x_scales);
        g.mainloop.layout_SFA = ScaleLayouts::tile_atom_to_shape_SFA(shape);
        g.mainloop.ptr_SFB = reinterpret_cast<const ElementScale*>(a.weight_scales);
        g.mainloop.layout_SFB = ScaleLayouts::tile_atom_to_shape_SFB(shape);
        g.epilogue.thread = Fusion::arguments(a);
        g.epilogue.ptr_C = nullptr;
        g.epilogue.dC = rows_apart<typename GemmKernel::StrideC>(a.n);
        g.epilogue.ptr_D = static_cast<Output*>(a.y);
        g.epilogue.dD = rows_apart<typename GemmKernel::StrideD>(a.n);
        g.hw_info.device_id = a.device;
        g.hw_info.sm_count = a.sm_count;
        return g;
    }

    static std::size_t workspace(const NativeArguments& a) { return Gemm::get_workspace_size(arguments(a)); }

    static const char* cannot(const NativeArguments& a) {
        const cutlass::Status status = Gemm::can_implement(arguments(a));
        if (status == cutlass::Status::kSuccess) return nullptr;
        // What it says of rows that do not start at multiples of 16 bytes.
        if (status == cutlass::Status::kInvalid) return "it can't implement this shape";
        return cutlass::cutlassGetStatusString(status);
    }

    static cudaError_t run(const NativeArguments& a, void* workspace, cudaStream_t stream) {
        Gemm gemm;
        if (gemm.initialize(arguments(a), workspace, stream) != cutlass::Status::kSuccess ||
            gemm.run(stream) != cutlass::Status::kSuccess) {
            const cudaError_t e = cudaGetLastError();
            return e != cudaSuccess ? e : cudaErrorInvalidConfiguration;
        }
        return cudaSuccess;
    }

    static bool loads() {
        cudaFuncAttributes attributes{};
        const bool found = cudaFuncGetAttributes(&attributes, cutlass::device_kernel<GemmKernel>) == cudaSuccess;
        if (!found) cudaGetLastError();  // expected on other GPUs, and not the caller's
        return found;
    }

    static constexpr NativeTile tile{cute::size<0>(Tile{}), cute::size<1>(Tile{}), cute::size<2>(Tile{}),
                                     cute::size<0>(Cluster{})};
};

// What a family exports: the small tile up to `most_rows_of_small` rows of x, the large one above.
template <class Small, class Large, std::int64_t most_rows_of_small>
struct Family {
    template <class Function>
    static auto choose(std::int64_t m, const Function& function) {
        return m <= most_rows_of_small ? function(Small{}) : function(Large{});
    }
    static NativeKernels kernels(const char* name) {
        return {
            .name = name,
            .tile = [](std::int64_t m) { return choose(m, [](auto kernel) { return decltype(kernel)::tile; }); },
            .workspace =
                [](const NativeArguments& a) { return choose(a.m, [&](auto kernel) { return kernel.workspace(a); }); },
            .cannot =
                [](const NativeArguments& a) { return choose(a.m, [&](auto kernel) { return kernel.cannot(a); }); },
            .run =
                [](const NativeArguments& a, void* workspace, cudaStream_t stream) {
                    return choose(a.m, [&](auto kernel) { return kernel.run(a, workspace, stream); });
                },
            .loads = [] { return Small::loads() && Large::loads(); }};
    }
};

}  // namespace fp4linear::cuda::device::native
