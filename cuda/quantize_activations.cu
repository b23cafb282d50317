// Activations to NVFP4. Bound by memory where it can be: a thread takes a block of 16 values in loads of 16 bytes, has
// asked for its next blocks before it works on this one, and decides by a table in shared memory that its thread block
// makes once (device/quantize_activations.cuh).
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/device/quantize_activations.cuh"
#include "cuda/quantize_activations.h"

namespace fp4linear::cuda {
namespace {

using namespace activations;

constexpr int warp = 32;
constexpr int threads = 512;                                // as many as an atom of swizzled scales has bytes
constexpr int blocks_per_sm = 2;                            // one wave: each thread takes several blocks of x
constexpr int amax_threads = 256, amax_blocks_per_sm = 8;   // resident where rows are aligned
constexpr std::int64_t most_items = std::int64_t{1} << 30;  // blocks of x in a launch: 32-bit indices
constexpr std::uint32_t all_lanes = 0xFFFFFFFFu;
constexpr std::uint32_t piece = sizeof(uint4);  // bytes of a load
constexpr int piece_words = 4;

// The types of x. A block of 16 values is `words` 32-bit words, as it lies in memory.
template <class Pattern_>
struct Halves {
    using Pattern = Pattern_;
    using Element = std::uint16_t;
    using Greatest = GreatestFinite<Pattern>;
    static constexpr int words = words_of_block;

    __device__ static float table_scale(float g) { return g; }
    __device__ static void halves(const std::uint32_t (&x)[words], float, std::uint32_t (&result)[words_of_block]) {
#pragma unroll
        for (int i = 0; i < words; ++i) result[i] = x[i];
    }
    // Bits of the greatest finite magnitude as an fp32 number.
    __device__ static std::uint32_t bits(const Greatest& greatest) {
        return bits_of_float(Pattern::value(greatest.pattern()));
    }
    __device__ static void put(std::uint32_t (&x)[words], int i, Element value) {
        x[i / 2] |= static_cast<std::uint32_t>(value) << 16 * (i % 2);
    }
};

// As GreatestFinite, of fp32 numbers.
struct GreatestSingle {
    static constexpr std::uint32_t bias = 0x80000000u - activation::infinity_bits;
    std::uint32_t biased = bias;

    __device__ void take(std::uint32_t x) {
        const std::uint32_t other = (x & activation::magnitude_bits) + bias;
        biased = static_cast<std::uint32_t>(max(static_cast<std::int32_t>(biased), static_cast<std::int32_t>(other)));
    }
};

struct Singles {
    using Pattern = BFloat16Pattern;
    using Element = std::uint32_t;
    using Greatest = GreatestSingle;
    static constexpr int words = block_size;

    __device__ static float table_scale(float) { return 1.0f; }
    __device__ static void halves(const std::uint32_t (&x)[words], float g, std::uint32_t (&result)[words_of_block]) {
#pragma unroll
        for (int i = 0; i < words_of_block; ++i) result[i] = odd_products(x[2 * i], x[2 * i + 1], g);
    }
    __device__ static std::uint32_t bits(const Greatest& greatest) { return greatest.biased - Greatest::bias; }
    __device__ static void put(std::uint32_t (&x)[words], int i, Element value) { x[i] = value; }
};

struct Input {
    const std::uint8_t* x;
    std::int64_t row_bytes;  // from a row to the next
    std::int64_t k;
    std::uint32_t rows;
    std::uint32_t row_blocks;
    std::uint32_t items;  // blocks of x
    std::uint32_t units;  // what a thread block takes at a time: `threads` items, or an atom of swizzled scales
    Divider divider;      // by the blocks of a row, or by the atoms of one
    const std::uint8_t *begin, *end;  // of all of x
};

struct Output {
    std::uint8_t* codes;     // of this launch's first row, as plain scales and those that are written by atoms
    std::uint8_t* scales;    // else of the whole
    std::int64_t first_row;  // of this launch, in the whole
    std::int64_t rows;       // of the whole
    bool last;               // launch: it zeroes the padding rows
    float* global_scale;     // where g is written to, or null
};

// The block of x that an item is.
struct Place {
    std::uint32_t row, block;
    __device__ Place(const Input& in, std::uint32_t item)
        : row(in.divider.quotient(item)), block(item - row * in.divider.divisor) {}
};

// What a thread has of an atom of swizzled scales and of the 128 rows of 4 blocks it stands for: the byte of its
// number. What differs from atom to atom is the same for all threads.
struct Atoms {
    AtomPlace own;
    std::int64_t x, codes;  // offsets of the thread's, bytes

    __device__ Atoms(const Input& in, std::uint32_t bytes_of_block)
        : own(threadIdx.x),
          x(own.row * in.row_bytes + own.block * bytes_of_block),
          codes((static_cast<std::int64_t>(own.row) * in.row_blocks + own.block) * (block_size / 2)) {}
};
struct Atom {
    std::uint32_t line, column;
    __device__ Atom(const Input& in, std::uint32_t unit)
        : line(in.divider.quotient(unit)), column(unit - line * in.divider.divisor) {}
    // Is the thread's place in x, not in the padding?
    [[nodiscard]] __device__ bool has(const Input& in, const Atoms& atoms) const {
        return atoms.own.row < in.rows - line * static_cast<std::uint32_t>(swizzle::atom_rows) &&
               atoms.own.block < in.row_blocks - column * static_cast<std::uint32_t>(swizzle::atom_blocks);
    }
    [[nodiscard]] __device__ std::int64_t x(const Input& in, std::uint32_t bytes_of_block) const {
        return line * (swizzle::atom_rows * in.row_bytes) +
               static_cast<std::int64_t>(column) * swizzle::atom_blocks * bytes_of_block;
    }
    [[nodiscard]] __device__ std::int64_t codes(const Input& in) const {
        return (static_cast<std::int64_t>(line) * swizzle::atom_rows * in.row_blocks +
                static_cast<std::int64_t>(column) * swizzle::atom_blocks) *
               (block_size / 2);
    }
};

template <class Type>
constexpr std::uint32_t block_bytes = block_size * sizeof(typename Type::Element);

template <class Type>
__device__ __forceinline__ const std::uint8_t* address(const Input& in, std::uint32_t row, std::uint32_t block) {
    return in.x + row * in.row_bytes + static_cast<std::uint64_t>(block) * block_bytes<Type>;
}

// Where it is not wanted the words are undefined. In PTX, since a branch around a load makes the compiler copy what the
// registers hold.
__device__ __forceinline__ void load_piece(const std::uint8_t* from, std::uint32_t* words, bool wanted) {
    asm volatile(
        "{\n\t"
        ".reg .pred wanted;\n\t"
        "setp.ne.u32 wanted, %5, 0;\n\t"
        "@wanted ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n\t"
        "}"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
        : "l"(from), "r"(static_cast<std::uint32_t>(wanted)));
}

// A block of x that has been asked for. whole: it has 16 values and starts at a multiple of 16 bytes. Else it is read
// as the aligned pieces that hold it, or by its values where it is short or they go beyond x.
template <class Type, bool whole>
struct Loaded {
    std::uint32_t pieces[Type::words];

    __device__ void load(const std::uint8_t* from, bool wanted) {
#pragma unroll
        for (int i = 0; i < Type::words; i += piece_words)
            load_piece(from + i * sizeof(std::uint32_t), pieces + i, wanted);
    }
    __device__ void load(const Input& in, const Place& at, bool wanted) {
        load(address<Type>(in, at.row, at.block), wanted);
    }
    __device__ void take(std::uint32_t (&x)[Type::words]) const {
#pragma unroll
        for (int i = 0; i < Type::words; ++i) x[i] = pieces[i];
    }
};

template <class Type>
struct Loaded<Type, false> {
    std::uint32_t pieces[Type::words + piece_words];
    std::uint32_t shift;  // of the block in its pieces, bytes

    __device__ void load(const Input& in, const Place& at, bool wanted) {
        using Element = typename Type::Element;
        const std::uint8_t* const from = address<Type>(in, at.row, at.block);
        shift = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(from) % piece);
        const std::uint8_t* const first = from - shift;
        const std::int64_t left = in.k - static_cast<std::int64_t>(at.block) * block_size;
        const std::uint32_t beyond = shift != 0 ? piece : 0;
        const bool fits = left >= block_size && first >= in.begin && first + block_bytes<Type> + beyond <= in.end;
#pragma unroll
        for (int i = 0; i < Type::words; i += piece_words)
            load_piece(first + i * sizeof(std::uint32_t), pieces + i, wanted && fits);
        load_piece(first + block_bytes<Type>, pieces + Type::words, wanted && fits && shift != 0);
        if (wanted && !fits) {
            shift = 0;
            std::uint32_t x[Type::words] = {};
#pragma unroll
            for (int i = 0; i < block_size; ++i)
                if (i < left) Type::put(x, i, __ldg(reinterpret_cast<const Element*>(from) + i));
#pragma unroll
            for (int i = 0; i < Type::words; ++i) pieces[i] = x[i];
        }
    }
    __device__ void take(std::uint32_t (&x)[Type::words]) const { words_from(pieces, shift, x); }
};

__device__ __forceinline__ float read(const GlobalScale& g) { return g.device != nullptr ? __ldg(g.device) : g.value; }

// The codes of the blocks that a warp has, `count` values each; count 0: the lane has none. K is even, so that they
// start at any byte, but those of 32 whole blocks of a row are 256 bytes that follow each other.
__device__ __forceinline__ void store_codes(std::uint8_t* codes, const std::uint32_t (&own)[2], std::uint32_t count,
                                            std::uint32_t block) {
    const std::uint32_t lane = threadIdx.x % warp;
    constexpr std::uint32_t bytes = block_size / 2;
    const bool row_of_whole_blocks = __all_sync(all_lanes, count == block_size && block >= lane);
    const auto shift = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(codes) % bytes);
    if (row_of_whole_blocks && shift == 0) {
        *reinterpret_cast<uint2*>(codes) = make_uint2(own[0], own[1]);
    } else if (row_of_whole_blocks) {
        const CodeWords before{{__shfl_up_sync(all_lanes, own[0], 1), __shfl_up_sync(all_lanes, own[1], 1)}};
        const CodeWords words = shifted_codes(before, {{own[0], own[1]}}, shift);
        if (lane != 0) *reinterpret_cast<uint2*>(codes - shift) = make_uint2(words.words[0], words.words[1]);
        // The first lane's bytes before the next multiple of 8 and the last one's after the last: 8, one a lane.
        const bool first = lane < bytes - shift;
        const int source = first ? 0 : warp - 1;
        const std::uint32_t low = __shfl_sync(all_lanes, own[0], source);
        const std::uint32_t high = __shfl_sync(all_lanes, own[1], source);
        if (lane < bytes)
            codes[(source - static_cast<int>(lane)) * static_cast<int>(bytes) + static_cast<int>(lane)] =
                static_cast<std::uint8_t>(permute(low, high, lane));
    } else {
#pragma unroll
        for (std::uint32_t i = 0; i < bytes; ++i)
            if (2 * i < count) codes[i] = static_cast<std::uint8_t>(own[i / 4] >> 8 * (i % 4));
    }
}

// The padding rows of swizzled scales: in the last atoms, lines of 16 bytes with the scales of four rows 32 apart.
__device__ __forceinline__ void zero_padding_rows(const Output& out, std::uint32_t row_blocks) {
    const auto rows = static_cast<std::uint32_t>(out.rows % swizzle::atom_rows);
    if (rows == 0) return;
    constexpr std::int64_t lines = 32, rows_of_line = 4;
    const std::int64_t columns = swizzle::padded_blocks(row_blocks) / swizzle::atom_blocks;
    std::uint8_t* const atoms = out.scales + out.rows / swizzle::atom_rows * columns * swizzle::atom_bytes;
    for (std::int64_t i = blockIdx.x * threads + threadIdx.x; i < columns * lines; i += gridDim.x * threads) {
        auto* const line = reinterpret_cast<std::uint32_t*>(atoms) + i * rows_of_line;
#pragma unroll
        for (int j = 0; j < rows_of_line; ++j)
            if (i % lines + j * lines >= rows) line[j] = 0;
    }
}

// whole: see Loaded; codes then lie at multiples of 8 bytes, and swizzled scales are written by atoms, with the
// padding.
template <class Type, bool whole, bool swizzled>
__global__ void __launch_bounds__(threads, blocks_per_sm)
    quantize_kernel(Input in, GlobalScale global_scale, Output out) {
    static_assert(threads == swizzle::atom_bytes);
    using Pattern = typename Type::Pattern;
    __shared__ Thresholds table[scale_count];
    constexpr bool by_atoms = whole && swizzled;
    // Aligned halves are worked on where they were loaded: the next block comes there after that, and two are on their
    // way. Others become halves first.
    constexpr bool in_place = whole && Type::words == words_of_block;
    constexpr std::uint32_t ahead = in_place ? 3 : 1;
    const Atoms atoms(in, block_bytes<Type>);

    Loaded<Type, whole> loaded[ahead];
    const auto ask = [&](std::uint32_t unit) {
        Loaded<Type, whole> result;
        if constexpr (by_atoms) {
            const Atom atom(in, unit);
            result.load(in.x + atoms.x + atom.x(in, block_bytes<Type>), unit < in.units && atom.has(in, atoms));
        } else {
            const std::uint32_t item = unit * threads + threadIdx.x;
            result.load(in, Place(in, item), item < in.items);
        }
        return result;
    };
#pragma unroll
    for (std::uint32_t i = 0; i < ahead; ++i) loaded[i] = ask(blockIdx.x + i * gridDim.x);
    const float g = read(global_scale);
    if (blockIdx.x == 0 && threadIdx.x == 0 && out.global_scale != nullptr) *out.global_scale = g;
    if constexpr (swizzled && !by_atoms)
        if (out.last) zero_padding_rows(out, in.row_blocks);
    const float table_scale = Type::table_scale(g);
    fill_table<Pattern>(table, table_scale, static_cast<int>(threadIdx.x), threads);
    __syncthreads();

    for (std::uint32_t unit = blockIdx.x; unit < in.units;) {
#pragma unroll
        for (std::uint32_t i = 0; i < ahead; ++i) {
            if (unit >= in.units) break;
            std::uint32_t x[Type::words], halves[words_of_block];
            loaded[i].take(x);
            Type::halves(x, g, halves);
            if constexpr (!in_place) loaded[i] = ask(unit + ahead * gridDim.x);
            const QuantizedBlock block = quantize_block<Pattern>(halves, table_scale, table);
            if constexpr (in_place) loaded[i] = ask(unit + ahead * gridDim.x);
            const std::uint32_t item = unit * threads + threadIdx.x;
            if constexpr (by_atoms) {
                const Atom atom(in, unit);
                const bool is_x = atom.has(in, atoms);
                if (is_x)
                    *reinterpret_cast<uint2*>(out.codes + atoms.codes + atom.codes(in)) =
                        make_uint2(block.codes[0], block.codes[1]);
                out.scales[static_cast<std::uint64_t>(unit) * threads + threadIdx.x] =
                    static_cast<std::uint8_t>(is_x ? block.scale : 0);
            } else if constexpr (whole) {
                if (item < in.items) {
                    reinterpret_cast<uint2*>(out.codes)[item] = make_uint2(block.codes[0], block.codes[1]);
                    out.scales[item] = static_cast<std::uint8_t>(block.scale);
                }
            } else {
                const Place at(in, item);
                const std::int64_t left = in.k - static_cast<std::int64_t>(at.block) * block_size;
                const auto count = static_cast<std::uint32_t>(left < block_size ? left : block_size);
                store_codes(out.codes + at.row * (in.k / 2) + static_cast<std::uint64_t>(at.block) * (block_size / 2),
                            block.codes, item < in.items ? count : 0, at.block);
                if (item < in.items) {
                    if constexpr (swizzled) {
                        const auto columns = (in.row_blocks + 3) / 4;
                        std::uint8_t* const scale =
                            out.scales +
                            swizzled_offset(static_cast<std::uint64_t>(out.first_row) + at.row, at.block, columns);
                        *scale = static_cast<std::uint8_t>(block.scale);
                        // The last block of a row has the padding beside it: at most 3 bytes of the same word.
                        if (at.block + 1 == in.row_blocks)
                            for (std::uint32_t j = 1; (at.block + j) % 4 != 0; ++j) scale[j] = 0;
                    } else {
                        out.scales[item] = static_cast<std::uint8_t>(block.scale);
                    }
                }
            }
            unit += gridDim.x;
        }
    }
}

// total_blocks: thread blocks of all launches that share `result`, which starts as zeros. The greatest of some numbers
// does not depend on the order in which they come.
template <class Type, bool whole>
__global__ void __launch_bounds__(amax_threads)
    amax_kernel(Input in, std::uint32_t total_blocks, DynamicScale* result) {
    constexpr int at_once = (whole ? 64 : 32) / Type::words;
    __shared__ std::uint32_t of_warps[amax_threads / warp];
    typename Type::Greatest of_thread;
    const std::uint32_t step = gridDim.x * amax_threads;
    for (std::uint32_t item = blockIdx.x * amax_threads + threadIdx.x; item < in.items; item += at_once * step) {
        Loaded<Type, whole> loaded[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            // Where the items end, the last of them again: it is no greater than itself.
            loaded[i].load(in, Place(in, min(item + i * step, in.items - 1)), true);
        }
#pragma unroll
        for (const Loaded<Type, whole>& each : loaded) {
            std::uint32_t x[Type::words];
            each.take(x);
#pragma unroll
            for (const std::uint32_t word : x) of_thread.take(word);
        }
    }
    std::uint32_t greatest = Type::bits(of_thread);
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

// How a problem is dealt out: launches of whole rows, and of whole atoms of swizzled scales where these fit.
struct Launches {
    std::int64_t row_blocks, columns, rows;
    std::int64_t sms = 1;

    explicit Launches(const Problem& p)
        : row_blocks(blocks_per_row(p.k, block_size)),
          columns(swizzle::padded_blocks(row_blocks) / swizzle::atom_blocks),
          rows(most_items / std::max<std::int64_t>(1, columns * swizzle::atom_blocks)) {
        rows = has_atoms() ? rows / swizzle::atom_rows * swizzle::atom_rows : std::max<std::int64_t>(1, rows);
    }
    [[nodiscard]] bool has_atoms() const { return rows >= swizzle::atom_rows; }
    cudaError_t ask_device() {
        int device = 0, count = 0;
        if (const cudaError_t e = cudaGetDevice(&device)) return e;
        if (const cudaError_t e = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device)) return e;
        sms = count;
        return cudaSuccess;
    }
    [[nodiscard]] Input input(const Problem& p, std::int64_t first, bool by_atoms) const {
        const std::int64_t count = std::min(rows, p.m - first);
        const auto element = static_cast<std::int64_t>(size_of(p.dtype));
        const std::int64_t row_bytes = p.x_row_stride * element;
        const std::int64_t to_last = std::max<std::int64_t>(0, p.m - 1) * row_bytes;
        const auto* const x = static_cast<const std::uint8_t*>(p.x);
        const std::int64_t items = count * row_blocks;
        const std::int64_t units =
            by_atoms ? swizzle::padded_rows(count) / swizzle::atom_rows * columns : (items + threads - 1) / threads;
        const std::int64_t divisor = std::max<std::int64_t>(1, by_atoms ? columns : row_blocks);
        return {x + first * row_bytes,
                row_bytes,
                p.k,
                static_cast<std::uint32_t>(count),
                static_cast<std::uint32_t>(row_blocks),
                static_cast<std::uint32_t>(items),
                static_cast<std::uint32_t>(units),
                Divider(static_cast<std::uint32_t>(divisor)),
                x + std::min<std::int64_t>(0, to_last),
                x + std::max<std::int64_t>(0, to_last) + p.k * element};
    }
    // Thread blocks for so many units.
    [[nodiscard]] unsigned grid(std::int64_t units, int of_sm) const {
        return static_cast<unsigned>(std::clamp<std::int64_t>(units, 1, sms * of_sm));
    }
};

template <class Type>
cudaError_t launch_amax(const Problem& p, const Launches& launches, DynamicScale* result, cudaStream_t stream) {
    const auto grid = [&](const Input& in) {
        return launches.grid((std::int64_t{in.items} + amax_threads - 1) / amax_threads, amax_blocks_per_sm);
    };
    std::uint32_t total = 0;
    for (std::int64_t first = 0; first == 0 || first < p.m; first += launches.rows)
        total += grid(launches.input(p, first, false));
    const auto kernel = is_whole(p) ? amax_kernel<Type, true> : amax_kernel<Type, false>;
    for (std::int64_t first = 0; first == 0 || first < p.m; first += launches.rows) {
        const Input in = launches.input(p, first, false);
        kernel<<<grid(in), amax_threads, 0, stream>>>(in, total, result);
        if (const cudaError_t e = cudaGetLastError()) return e;
    }
    return cudaSuccess;
}

template <class Type>
cudaError_t launch_quantize(const Problem& p, const Launches& launches, GlobalScale global_scale, ScaleLayout layout,
                            const Output& whole_output, cudaStream_t stream) {
    const bool swizzled = layout == ScaleLayout::swizzled;
    const bool whole =
        is_whole(p) && starts_at(whole_output.codes, sizeof(uint2)) && (!swizzled || launches.has_atoms());
    const bool by_atoms = whole && swizzled;
    const auto kernel = whole ? (swizzled ? quantize_kernel<Type, true, true> : quantize_kernel<Type, true, false>)
                              : (swizzled ? quantize_kernel<Type, false, true> : quantize_kernel<Type, false, false>);
    for (std::int64_t first = 0; first == 0 || first < p.m; first += launches.rows) {
        const Input in = launches.input(p, first, by_atoms);
        Output out = whole_output;
        out.codes += first * (p.k / 2);
        if (!swizzled) out.scales += first * launches.row_blocks;
        if (by_atoms) out.scales += first * launches.columns * swizzle::atom_blocks;
        out.first_row = first;
        out.last = p.k > 0 && first + launches.rows >= p.m;
        kernel<<<launches.grid(in.units, blocks_per_sm), threads, 0, stream>>>(in, global_scale, out);
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
