// Activations to NVFP4. Bound by memory where it can be: a thread takes a block of 16 values in two loads of 16 bytes,
// asks for its next block before it works on this one, and decides by a table in shared memory that its thread block
// makes once for g (device/quantize_activations.cuh). fp32 goes by the plain rule.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/device/quantize_activations.cuh"
#include "cuda/quantize_activations.h"

namespace fp4linear::cuda {
namespace {

using namespace activations;

constexpr int threads = 256;
constexpr int most_blocks_per_sm = 4;                       // one wave: each thread takes several blocks of x
constexpr std::int64_t most_items = std::int64_t{1} << 30;  // blocks of x in a launch: 32-bit indices
constexpr std::uint32_t all_lanes = 0xFFFFFFFFu;

// The types of x. A block of 16 values is `words` 32-bit words, as it lies in memory.
template <class Pattern>
struct Halves {
    using Element = std::uint16_t;
    using Table = Thresholds[scale_count];
    static constexpr int words = words_of_block;
    static constexpr int blocks_per_sm = most_blocks_per_sm;  // that the registers leave room for

    __device__ static void prepare(Table& table, float g) {
        fill_table<Pattern>(table, g, static_cast<int>(threadIdx.x), threads);
        __syncthreads();
    }
    __device__ static QuantizedBlock quantize(const std::uint32_t (&x)[words], int, float g, const Table& table) {
        return quantize_block<Pattern>(x, g, table);
    }
    // Bits of the greatest finite magnitude as an fp32 number.
    __device__ static std::uint32_t greatest(const std::uint32_t (&x)[words]) {
        std::uint32_t pair = 0;
#pragma unroll
        for (int i = 0; i < words; ++i) pair = max_lanes(pair, finite_magnitudes<Pattern>(x[i]));
        return bits_of_float(Pattern::value(max(pair & 0xFFFFu, pair >> 16)));
    }
    __device__ static void put(std::uint32_t (&x)[words], int i, Element value) {
        x[i / 2] |= static_cast<std::uint32_t>(value) << 16 * (i % 2);
    }
};

struct Singles {
    using Element = std::uint32_t;
    using Table = activation::Split[1];
    static constexpr int words = block_size;
    static constexpr int blocks_per_sm = 2;

    __device__ static void prepare(Table& table, float g) {
        if (threadIdx.x == 0) table[0] = activation::split(bits_of_float(g));
        __syncthreads();
    }
    __device__ static QuantizedBlock quantize(const std::uint32_t (&x)[words], int count, float, const Table& table) {
        std::uint8_t codes[block_size];
        QuantizedBlock result{{0, 0}, activation::quantize_block(x, words, table[0], codes)};
#pragma unroll
        for (int i = 0; i < block_size; ++i)
            if (i < count) result.codes[i / 8] |= static_cast<std::uint32_t>(codes[i]) << 4 * (i % 8);
        return result;
    }
    __device__ static std::uint32_t greatest(const std::uint32_t (&x)[words]) {
        std::uint32_t result = 0;
#pragma unroll
        for (int i = 0; i < words; ++i) {
            const std::uint32_t magnitude = x[i] & activation::magnitude_bits;
            result = max(result, magnitude < activation::infinity_bits ? magnitude : 0u);
        }
        return result;
    }
    __device__ static void put(std::uint32_t (&x)[words], int i, Element value) { x[i] = value; }
};

struct Input {
    const void* x;
    std::int64_t row_stride;  // elements
    std::int64_t k;
    std::uint32_t items;  // blocks of x in this launch
    Divider blocks;       // of a row
};

struct Place {
    std::uint32_t row, block;
    __device__ Place(const Input& in, std::uint32_t item)
        : row(in.blocks.quotient(item)), block(item - row * in.blocks.divisor) {}
};

// One block of x. whole: it has 16 values and starts at a multiple of 16 bytes; else zeros fill it up.
template <class Type, bool whole>
__device__ __forceinline__ void load(const Input& in, const Place& at, std::uint32_t (&x)[Type::words]) {
    using Element = typename Type::Element;
    const Element* from = static_cast<const Element*>(in.x) + static_cast<std::int64_t>(at.row) * in.row_stride +
                          static_cast<std::int64_t>(at.block) * block_size;
    if constexpr (whole) {
#pragma unroll
        for (int i = 0; i < Type::words; i += 4) {
            const uint4 piece = __ldg(reinterpret_cast<const uint4*>(from) + i / 4);
            x[i] = piece.x;
            x[i + 1] = piece.y;
            x[i + 2] = piece.z;
            x[i + 3] = piece.w;
        }
    } else {
        const std::int64_t left = in.k - static_cast<std::int64_t>(at.block) * block_size;
#pragma unroll
        for (int i = 0; i < Type::words; ++i) x[i] = 0;
#pragma unroll
        for (int i = 0; i < block_size; ++i)
            if (i < left) Type::put(x, i, from[i]);
    }
}

struct Output {
    std::uint8_t* codes;
    std::uint8_t* scales;
    std::int64_t first_row;  // of this launch, in the whole
    std::int64_t rows;       // of the whole
    bool last;               // launch: it zeroes the padding rows
    float* global_scale;     // where g is written to, or null
};

__device__ __forceinline__ float read(const GlobalScale& g) { return g.device != nullptr ? __ldg(g.device) : g.value; }

// whole: see load(); codes then lie at multiples of 8 bytes.
template <class Type, bool whole, bool swizzled>
__global__ void __launch_bounds__(threads, Type::blocks_per_sm)
    quantize_kernel(Input in, GlobalScale global_scale, Output out) {
    __shared__ typename Type::Table table;
    const std::uint32_t step = gridDim.x * threads;
    std::uint32_t item = blockIdx.x * threads + threadIdx.x;
    std::uint32_t next[Type::words];
    if (item < in.items) load<Type, whole>(in, Place(in, item), next);
    const float g = read(global_scale);
    if (item == 0 && out.global_scale != nullptr) *out.global_scale = g;
    Type::prepare(table, g);

    const std::int64_t row_blocks = in.blocks.divisor;
    while (item < in.items) {
        const Place at(in, item);
        std::uint32_t x[Type::words];
#pragma unroll
        for (int i = 0; i < Type::words; ++i) x[i] = next[i];
        item += step;
        if (item < in.items) load<Type, whole>(in, Place(in, item), next);

        const std::int64_t left = in.k - static_cast<std::int64_t>(at.block) * block_size;
        const int count = whole || left > block_size ? block_size : static_cast<int>(left);
        const QuantizedBlock block = Type::quantize(x, count, g, table);
        const std::int64_t row = out.first_row + at.row;
        std::uint8_t* const codes =
            out.codes + row * (in.k / 2) + static_cast<std::int64_t>(at.block) * (block_size / 2);
        if constexpr (whole) {
            *reinterpret_cast<uint2*>(codes) = make_uint2(block.codes[0], block.codes[1]);
        } else {
#pragma unroll
            for (int i = 0; i < block_size / 2; ++i)
                if (2 * i < count) codes[i] = static_cast<std::uint8_t>(block.codes[i / 4] >> 8 * (i % 4));
        }
        if constexpr (swizzled) {
            std::uint8_t* const scale = out.scales + swizzle::offset(row, at.block, row_blocks);
            *scale = static_cast<std::uint8_t>(block.scale);
            // The last block of a row has the padding beside it: at most 3 bytes of the same word.
            for (std::int64_t i = 1; at.block + 1 == row_blocks && (at.block + i) % swizzle::atom_blocks != 0; ++i)
                scale[i] = 0;
        } else {
            out.scales[row * row_blocks + at.block] = static_cast<std::uint8_t>(block.scale);
        }
    }
    if constexpr (swizzled) {
        if (!out.last) return;
        const std::int64_t words = swizzle::padded_blocks(row_blocks) / swizzle::atom_blocks;
        const std::int64_t count = (swizzle::padded_rows(out.rows) - out.rows) * words;
        for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x; i < count; i += step) {
            const std::int64_t row = out.rows + i / words;
            *reinterpret_cast<std::uint32_t*>(out.scales +
                                              swizzle::offset(row, i % words * swizzle::atom_blocks, row_blocks)) = 0;
        }
    }
}

// total_blocks: thread blocks of all launches that share `result`, which starts as zeros. The greatest of some numbers
// does not depend on the order in which they come.
template <class Type, bool whole>
__global__ void __launch_bounds__(threads) amax_kernel(Input in, std::uint32_t total_blocks, DynamicScale* result) {
    constexpr int warp = 32;
    __shared__ std::uint32_t of_warps[threads / warp];
    std::uint32_t greatest = 0;
    const std::uint32_t step = gridDim.x * threads;
    for (std::uint32_t item = blockIdx.x * threads + threadIdx.x; item < in.items; item += step) {
        std::uint32_t x[Type::words];
        load<Type, whole>(in, Place(in, item), x);
        greatest = max(greatest, Type::greatest(x));
    }
    for (int distance = warp / 2; distance > 0; distance /= 2)
        greatest = max(greatest, __shfl_xor_sync(all_lanes, greatest, distance));
    if (threadIdx.x % warp == 0) of_warps[threadIdx.x / warp] = greatest;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (const std::uint32_t each : of_warps) greatest = max(greatest, each);
    atomicMax(&result->amax, greatest);
    __threadfence();
    if (atomicAdd(&result->finished, 1u) + 1 != total_blocks) return;
    __threadfence();
    result->global_scale = activation::global_scale_for(float_of_bits(atomicMax(&result->amax, 0u)));
}

bool starts_at(const void* memory, std::uintptr_t alignment) {
    return reinterpret_cast<std::uintptr_t>(memory) % alignment == 0;
}

// Can every block of x be read by loads of 16 bytes?
bool is_whole(const Problem& p) {
    const std::int64_t row_bytes = p.x_row_stride * static_cast<std::int64_t>(size_of(p.dtype));
    return p.k % block_size == 0 && starts_at(p.x, sizeof(uint4)) &&
           (p.m == 1 || row_bytes % static_cast<std::int64_t>(sizeof(uint4)) == 0);
}

// How a problem is dealt out: launches of whole rows.
struct Launches {
    std::int64_t row_blocks, rows, most_grid = 1;

    explicit Launches(const Problem& p)
        : row_blocks(blocks_per_row(p.k, block_size)),
          rows(std::max<std::int64_t>(1, most_items / std::max<std::int64_t>(1, row_blocks))) {}
    cudaError_t ask_device() {
        int device = 0, sms = 0;
        if (const cudaError_t e = cudaGetDevice(&device)) return e;
        if (const cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return e;
        most_grid = std::int64_t{sms} * most_blocks_per_sm;
        return cudaSuccess;
    }
    [[nodiscard]] Input input(const Problem& p, std::int64_t first) const {
        const std::int64_t count = std::min(rows, p.m - first);
        return {static_cast<const std::uint8_t*>(p.x) +
                    first * p.x_row_stride * static_cast<std::int64_t>(size_of(p.dtype)),
                p.x_row_stride, p.k, static_cast<std::uint32_t>(count * row_blocks),
                Divider(static_cast<std::uint32_t>(std::max<std::int64_t>(1, row_blocks)))};
    }
    [[nodiscard]] unsigned grid(std::uint32_t items) const {
        return static_cast<unsigned>(
            std::clamp<std::int64_t>((std::int64_t{items} + threads - 1) / threads, 1, most_grid));
    }
};

template <class Type>
cudaError_t launch_amax(const Problem& p, const Launches& launches, DynamicScale* result, cudaStream_t stream) {
    std::uint32_t total = 0;
    for (std::int64_t first = 0; first == 0 || first < p.m; first += launches.rows)
        total += launches.grid(launches.input(p, first).items);
    const auto kernel = is_whole(p) ? amax_kernel<Type, true> : amax_kernel<Type, false>;
    for (std::int64_t first = 0; first == 0 || first < p.m; first += launches.rows) {
        const Input in = launches.input(p, first);
        kernel<<<launches.grid(in.items), threads, 0, stream>>>(in, total, result);
        if (const cudaError_t e = cudaGetLastError()) return e;
    }
    return cudaSuccess;
}

template <class Type>
cudaError_t launch_quantize(const Problem& p, const Launches& launches, GlobalScale global_scale, ScaleLayout layout,
                            Output out, cudaStream_t stream) {
    const bool whole = is_whole(p) && starts_at(out.codes, sizeof(uint2));
    const bool swizzled = layout == ScaleLayout::swizzled;
    const auto kernel = whole ? (swizzled ? quantize_kernel<Type, true, true> : quantize_kernel<Type, true, false>)
                              : (swizzled ? quantize_kernel<Type, false, true> : quantize_kernel<Type, false, false>);
    for (std::int64_t first = 0; first == 0 || first < p.m; first += launches.rows) {
        const Input in = launches.input(p, first);
        out.first_row = first;
        out.last = p.k > 0 && first + launches.rows >= p.m;
        kernel<<<launches.grid(in.items), threads, 0, stream>>>(in, global_scale, out);
        if (const cudaError_t e = cudaGetLastError()) return e;
    }
    return cudaSuccess;
}

}  // namespace

cudaError_t dynamic_global_scale(const Problem& p, DynamicScale* result, cudaStream_t stream) {
    Launches launches(p);
    if (const cudaError_t e = launches.ask_device()) return e;
    if (const cudaError_t e = cudaMemsetAsync(result, 0, sizeof *result, stream)) return e;
    switch (p.dtype) {
        case DType::float16: return launch_amax<Halves<Float16Pattern>>(p, launches, result, stream);
        case DType::bfloat16: return launch_amax<Halves<BFloat16Pattern>>(p, launches, result, stream);
        case DType::float32: return launch_amax<Singles>(p, launches, result, stream);
    }
    return cudaErrorInvalidValue;
}

cudaError_t quantize_activations(const Problem& p, GlobalScale global_scale, ScaleLayout layout, std::uint8_t* codes,
                                 std::uint8_t* scales, cudaStream_t stream, float* global_scale_out) {
    Launches launches(p);
    if (const cudaError_t e = launches.ask_device()) return e;
    const Output out{codes, scales, 0, p.m, false, global_scale_out};
    switch (p.dtype) {
        case DType::float16:
            return launch_quantize<Halves<Float16Pattern>>(p, launches, global_scale, layout, out, stream);
        case DType::bfloat16:
            return launch_quantize<Halves<BFloat16Pattern>>(p, launches, global_scale, layout, out, stream);
        case DType::float32: return launch_quantize<Singles>(p, launches, global_scale, layout, out, stream);
    }
    return cudaErrorInvalidValue;
}

}  // namespace fp4linear::cuda
