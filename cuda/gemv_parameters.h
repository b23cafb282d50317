// What the kernels of gemv_tensor_core are launched with.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/device/repair.cuh"
#include "cuda/kernels.h"
#include "cuda/prepacked.h"

namespace fp4linear::cuda {

struct GemvParameters : device::RepairSource {
    std::uint16_t* y;
    int m;
    int k_units;
    int tiles;
    bool x_aligned;  // rows start at multiples of 16 bytes
    // Of the streaming kernel alone.
    int splits;            // warps along K in a block
    int cluster;           // blocks along K: they share their tiles
    int slots;             // tiles whose sums a block of a cluster collects
    int groups;            // of `splits` warps in a block: a tile each
    int stages;            // copies in flight in a warp
    int early_stages;      // of them, requested before x
    int units_a_warp;      // a cluster deals K out evenly: this many units to every warp of a tile,
    int extra_steps;       // and one (M = 1: two) more to the first `extra_steps` of them
    int first_k_unit;      // a K beyond what the registers of the blocks hold takes several launches
    const float* sums_in;  // of the launches before, or null
    float* sums_out;       // for the next launch, or null: then y is stored
};

// Of GemvArguments or GemmArguments.
template <class Arguments>
GemvParameters gemv_parameters(const Arguments& a) {
    GemvParameters p{};
    p.weight = a.prepacked;
    p.x = static_cast<const std::uint16_t*>(a.x);
    p.y = static_cast<std::uint16_t*>(a.y);
    p.scale2_rows = a.scale2_rows;
    p.bias = a.bias;
    p.scale2 = a.scale2;
    p.x_row_stride = a.x_row_stride;
    p.n = a.n;
    p.k = a.k;
    p.m = static_cast<int>(a.m);
    p.k_units = static_cast<int>(prepacked::k_units(a.k));
    p.tiles = static_cast<int>(prepacked::row_tiles(a.n));
    p.x_aligned = reinterpret_cast<std::uintptr_t>(a.x) % 16 == 0 && (a.m == 1 || a.x_row_stride % 8 == 0);
    return p;
}

// gemv_small.cu: a layer of which a block takes 16 outputs, and holds their weights in registers.
struct SmallConfiguration {
    int units;     // K of a warp / 64
    int warps;     // of a block
    int resident;  // blocks that share an SM at most, at least 2
};
// False where the streaming kernel is faster.
bool configure_small(const GemvParameters& p, int sm_count, SmallConfiguration& c);
cudaError_t gemv_small(const GemvParameters& p, const SmallConfiguration& c, const GemvArguments& a);

}  // namespace fp4linear::cuda
