// The arithmetic of the native path on any GPU, to find out what it costs a model in accuracy: right and deterministic
// before fast. A block of threads owns 64 x 64 of y and walks K in ascending order, as the CPU does.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/check.h"
#include "cuda/device/native_emulated.cuh"
#include "cuda/kernels.h"
#include "cuda/native_emulated.h"
#include "cuda/prepacked.h"
#include "cuda/workspace.h"

namespace fp4linear::cuda {
namespace {

using namespace emulated;

constexpr int threads = 256;
constexpr int tile = 64;                                     // rows and columns of y
constexpr int tile_blocks = 4;                               // of K, in shared memory at a time
constexpr int columns_of_threads = 16;                       // and rows
constexpr int share = tile / columns_of_threads;             // rows and columns of a thread
constexpr int row_words = tile_blocks * words_of_block + 4;  // 80 bytes: eight rows' pieces of 16 touch every bank once
constexpr std::int64_t most_grid_rows = 65535;               // gridDim.y

static_assert(tile * tile_blocks == threads, "a thread loads one block of each operand");
static_assert(columns_of_threads * columns_of_threads == threads);

struct Tile {
    alignas(16) std::uint32_t words[tile][row_words];
    float scales[tile_blocks][tile];
};

// A matrix of codes and plain scales, as x and the weight are.
struct Matrix {
    const std::uint8_t* codes;   // [rows, k/2]
    const std::uint8_t* scales;  // [rows, blocks]
    std::int64_t rows, k, blocks;
    bool whole;  // blocks are full and lie at multiples of 8 bytes
};

// One block of 16 codes; zeros beyond the end of the row.
__device__ uint2 load_codes(const Matrix& matrix, std::int64_t row, std::int64_t block) {
    const std::uint8_t* from = matrix.codes + row * (matrix.k / 2) + block * (block_size / 2);
    if (matrix.whole) return __ldg(reinterpret_cast<const uint2*>(from));
    const std::int64_t left = matrix.k / 2 - block * (block_size / 2);
    std::uint32_t words[2] = {0, 0};
    for (int i = 0; i < block_size / 2; ++i)
        if (i < left) words[i / 4] |= static_cast<std::uint32_t>(from[i]) << 8 * (i % 4);
    return make_uint2(words[0], words[1]);
}

// Thread t takes block t % 4 of row t / 4; rows and blocks that do not exist become zeros.
__device__ void fill(Tile& to, const Matrix& matrix, std::int64_t first_row, std::int64_t first_block, float unit) {
    const int row = static_cast<int>(threadIdx.x) / tile_blocks, block = static_cast<int>(threadIdx.x) % tile_blocks;
    const bool exists = first_row + row < matrix.rows && first_block + block < matrix.blocks;
    uint2 codes = make_uint2(0, 0);
    float scale = 0.0f;
    if (exists) {
        codes = load_codes(matrix, first_row + row, first_block + block);
        scale = scale_value(matrix.scales[(first_row + row) * matrix.blocks + first_block + block]) * unit;
    }
    *reinterpret_cast<uint4*>(&to.words[row][block * words_of_block]) =
        make_uint4(doubled(codes.x), doubled(codes.x >> 16), doubled(codes.y), doubled(codes.y >> 16));
    to.scales[block][row] = scale;
}

struct Output {
    void* y;
    std::int64_t row_stride;
    float scale2;
    const float* scale2_rows;
    const float* bias;
    GlobalScale global_scale;
};

template <class T>
__global__ void __launch_bounds__(threads) emulated_kernel(Matrix x, Matrix weight, Output out) {
    __shared__ Tile x_tile, weight_tile;
    const int column = static_cast<int>(threadIdx.x) % columns_of_threads;
    const int row = static_cast<int>(threadIdx.x) / columns_of_threads;
    const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * tile;
    const float g = out.global_scale.device != nullptr ? *out.global_scale.device : out.global_scale.value;
    for (std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * tile; first_row < x.rows;
         first_row += static_cast<std::int64_t>(gridDim.y) * tile) {
        float sums[share][share] = {};
        for (std::int64_t first_block = 0; first_block < x.blocks; first_block += tile_blocks) {
            fill(x_tile, x, first_row, first_block, 1.0f);
            fill(weight_tile, weight, first_column, first_block, product_unit);
            __syncthreads();
            const int count = static_cast<int>(min(static_cast<std::int64_t>(tile_blocks), x.blocks - first_block));
            for (int block = 0; block < count; ++block) {
                std::uint32_t of_x[share][words_of_block], of_weight[share][words_of_block];
                float x_scales[share], weight_scales[share];
#pragma unroll
                for (int i = 0; i < share; ++i) {
                    const int r = row + i * columns_of_threads, c = column + i * columns_of_threads;
                    *reinterpret_cast<uint4*>(of_x[i]) =
                        *reinterpret_cast<const uint4*>(&x_tile.words[r][block * words_of_block]);
                    *reinterpret_cast<uint4*>(of_weight[i]) =
                        *reinterpret_cast<const uint4*>(&weight_tile.words[c][block * words_of_block]);
                    x_scales[i] = x_tile.scales[block][r];
                    weight_scales[i] = weight_tile.scales[block][c];
                }
#pragma unroll
                for (int i = 0; i < share; ++i)
#pragma unroll
                    for (int j = 0; j < share; ++j)
                        sums[i][j] = add_block(of_x[i], of_weight[j], x_scales[i], weight_scales[j], sums[i][j]);
            }
            __syncthreads();
        }
#pragma unroll
        for (int j = 0; j < share; ++j) {
            const std::int64_t n = first_column + column + j * columns_of_threads;
            if (n >= weight.rows) continue;
            const float scale2 = out.scale2_rows != nullptr ? out.scale2_rows[n] : out.scale2;
            const float* bias = out.bias != nullptr ? out.bias + n : nullptr;
#pragma unroll
            for (int i = 0; i < share; ++i) {
                const std::int64_t m = first_row + row + i * columns_of_threads;
                if (m >= x.rows) continue;
                // Two roundings, as on the CPU.
                const float value = __double2float_rn(finish(sums[i][j], scale2, g, bias));
                T* const y = static_cast<T*>(out.y) + m * out.row_stride + n;
                if constexpr (std::is_same_v<T, __half>)
                    *y = __float2half_rn(value);
                else
                    *y = __float2bfloat16_rn(value);
            }
        }
    }
}

Matrix matrix(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t rows, std::int64_t k) {
    const bool whole = k % block_size == 0 && reinterpret_cast<std::uintptr_t>(codes) % sizeof(uint2) == 0;
    return {codes, scales, rows, k, blocks_per_row(k, block_size), whole};
}

// Rows of the weight whose canonical form is made at once: 64 MiB, the scratch that the product promises at most, or
// the rows of one unit.
std::int64_t rows_of_chunk(const DeviceWeight& w) {
    constexpr std::int64_t scratch_bytes = std::int64_t{64} << 20;
    const std::int64_t row_bytes = w.k / 2 + w.k / block_size;
    const std::int64_t units = std::max<std::int64_t>(1, scratch_bytes / (row_bytes * prepacked::unit_rows));
    return std::min(units, prepacked::row_tiles(w.n)) * prepacked::unit_rows;
}

}  // namespace

cudaError_t multiply_emulated(const EmulatedArguments& a, cudaStream_t stream) {
    if (a.m == 0 || a.n == 0) return cudaSuccess;
    const Matrix x = matrix(a.x_codes, a.x_scales, a.m, a.k);
    const Matrix weight = matrix(a.b, a.scales, a.n, a.k);
    const Output out{a.y, a.y_row_stride, a.scale2, a.scale2_rows, a.bias, a.global_scale};
    const dim3 grid(static_cast<unsigned>((a.n + tile - 1) / tile),
                    static_cast<unsigned>(std::min((a.m + tile - 1) / tile, most_grid_rows)));
    if (a.dtype == DType::float16) {
        emulated_kernel<__half><<<grid, threads, 0, stream>>>(x, weight, out);
    } else {
        emulated_kernel<__nv_bfloat16><<<grid, threads, 0, stream>>>(x, weight, out);
    }
    return cudaGetLastError();
}

void native_emulated(const DeviceWeight& w, const Problem& p, float input_global_scale, cudaStream_t stream) {
    const QuantizedActivations x = quantize_to_scratch(p, input_global_scale, ScaleLayout::plain, stream);
    EmulatedArguments a;
    a.m = p.m;
    a.k = p.k;
    a.dtype = p.dtype;
    a.x_codes = x.codes;
    a.x_scales = x.scales;
    a.scale2 = w.scale2;
    a.global_scale = x.global_scale;
    a.y_row_stride = p.n;
    const bool is_prepacked = w.form == WeightForm::prepacked;
    const std::int64_t rows = is_prepacked ? rows_of_chunk(w) : p.n;
    const std::int64_t chunk_code_bytes = rows * (p.k / 2);  // a multiple of 8: 16 rows, and K of 64
    std::uint8_t* chunk = nullptr;
    if (is_prepacked)
        chunk = static_cast<std::uint8_t*>(scratch(
            Scratch::native_weight, static_cast<std::size_t>(chunk_code_bytes + rows * (p.k / block_size)), stream));
    for (std::int64_t first = 0; first < p.n; first += rows) {
        a.n = std::min(rows, p.n - first);
        a.b = w.b();
        a.scales = w.scales();
        if (is_prepacked) {
            FP4LINEAR_CUDA_CHECK(unpack(w.prepacked() + prepacked::unit_offset(first, 0, p.k), a.n, p.k, chunk,
                                        chunk + chunk_code_bytes, stream));
            a.b = chunk;
            a.scales = chunk + chunk_code_bytes;
        }
        a.scale2_rows = w.scale2_rows() == nullptr ? nullptr : w.scale2_rows() + first;
        a.bias = w.bias() == nullptr ? nullptr : w.bias() + first;
        a.y = static_cast<std::uint16_t*>(p.y) + first;
        FP4LINEAR_CUDA_CHECK(multiply_emulated(a, stream));
    }
}

}  // namespace fp4linear::cuda
