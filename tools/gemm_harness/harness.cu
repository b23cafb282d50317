// The gemm_fused kernels by themselves: correctness against an fp64 product computed on the device from the canonical
// weight, and timing by graph replays over distinct weights beside cuBLAS's dense product.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "cuda/cublaslt.h"
#include "cuda/gemm.h"
#include "cuda/kernels.h"
#include "cuda/prepacked.h"

using namespace fp4linear;
using namespace fp4linear::cuda;

namespace {

void require(cudaError_t e, const char* what, int line) {
    if (e == cudaSuccess) return;
    std::printf("CUDA error %s at line %d: %s\n", cudaGetErrorString(e), line, what);
    std::exit(1);
}
#define CHECK(e) require((e), #e, __LINE__)

struct Buffer {
    char* p = nullptr;
    std::size_t bytes;
    explicit Buffer(std::size_t n) : bytes(n) { CHECK(cudaMalloc(&p, n + 64)); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { cudaFree(p); }
    void poison() { CHECK(cudaMemset(p, 0xFF, bytes)); }
    template <class V>
    V* as() {
        return reinterpret_cast<V*>(p);
    }
};

int sm_count, shared_limit, arch;
bool wgmma = false;

// ---- the kernels under test: a letter, and eight numbers that a line of the input gives (0: the measured choice)
struct Tuning {
    int v[8] = {};
    bool given() const { return v[0] != 0; }
};

GemmWgmmaTuning wgmma_tuning(const Tuning& t);
GemmMmaTuning mma_tuning(const Tuning& t);
#include "tuning.h"

// 'f': the kernel that gemm_fused takes; where 'm' then finds no room, 'w' is next.
char resolve(char kernel, const GemmArguments& a) {
    if (kernel != 'f') return kernel;
    switch (choose_gemm(a)) {
        case GemmKernel::small: return 's';
        case GemmKernel::mma: return 'm';
        default: return 'w';
    }
}

// A workspace is gemm_wgmma's, whose start is zero at first and left so, with gemm_mma's behind it.
std::size_t wgmma_bytes(const GemmArguments& a) {
    return gemm_wgmma_supports(a) ? (gemm_wgmma_workspace(a) + 255) / 256 * 256 : 0;
}
std::size_t workspace_bytes(char kernel, const GemmArguments& a) {
    if (kernel == 'd') return 0;
    if (kernel == 'g') return gemv_tensor_core_workspace(a.n, a.k, a.max_shared_memory);
    return wgmma_bytes(a) + gemm_mma_workspace(a);
}
void clear_flags(char kernel, void* space, const GemmArguments& a) {
    if (kernel != 'd' && kernel != 'g' && wgmma_bytes(a) != 0) CHECK(cudaMemset(space, 0, gemm_wgmma_flag_bytes));
}
cudaError_t launch(char asked, const GemmArguments& a, const Tuning& t) {
    char kernel = resolve(asked, a);
    if (kernel == 'm') {
        GemmArguments behind = a;
        behind.workspace = static_cast<char*>(a.workspace) + wgmma_bytes(a);
        const cudaError_t e = gemm_mma(behind, mma_tuning(t));
        if (asked != 'f' || e != cudaErrorInvalidConfiguration) return e;
        kernel = 'w';
    }
    if (kernel == 'w') return gemm_wgmma(a, wgmma_tuning(t));
    if (kernel == 's') return gemm_small_supports(a) ? gemm_small(a) : cudaErrorInvalidConfiguration;
    if (kernel != 'g') return cudaErrorNotSupported;
    // The GEMV in passes of at most 8 rows.
    GemvArguments g;
    g.n = a.n;
    g.k = a.k;
    g.dtype = a.dtype;
    g.x_row_stride = a.x_row_stride;
    g.prepacked = a.prepacked;
    g.scale2 = a.scale2;
    g.scale2_rows = a.scale2_rows;
    g.bias = a.bias;
    g.sm_count = a.sm_count;
    g.max_shared_memory = a.max_shared_memory;
    g.kernel_arch = a.kernel_arch;
    g.programmatic_launch = a.programmatic_launch;
    g.workspace = a.workspace;
    g.stream = a.stream;
    const std::int64_t passes = (a.m + 7) / 8;
    for (std::int64_t i = 0; i < passes; ++i) {
        const std::int64_t first = a.m * i / passes;
        g.m = a.m * (i + 1) / passes - first;
        g.x = static_cast<const char*>(a.x) + first * a.x_row_stride * 2;
        g.y = static_cast<char*>(a.y) + first * a.n * 2;
        if (const cudaError_t e = gemv_tensor_core(g)) return e;
    }
    return cudaSuccess;
}

// ---- data
__host__ __device__ std::uint32_t mix(std::uint32_t h) {
    h *= 2654435761u;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    h *= 3266489917u;
    return h ^ h >> 16;
}
__device__ float gauss(std::uint32_t h) {  // near enough: the sum of four uniforms
    float s = 0;
    for (int i = 0; i < 4; ++i) s += static_cast<float>((mix(h + 77777u * i) >> 8) & 0xFFFFu) / 65536.0f - 0.5f;
    return s * 1.7f;
}

enum XKind { normal, wide, huge, tiny, bits, mixed, not_finite, zero_rows, kinds };
const char* const kind_name[] = {"normal", "wide", "huge", "tiny", "bits", "mixed", "inf/nan", "zero rows"};

__global__ void fill_bytes(std::uint8_t* p, std::size_t n, std::uint32_t seed, int what) {
    for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
         i += std::size_t{gridDim.x} * blockDim.x) {
        const std::uint32_t h = mix(static_cast<std::uint32_t>(i) ^ mix(seed));
        std::uint8_t v = static_cast<std::uint8_t>(h >> 7);
        if (what == 1 && (v & 0x7F) == 0x7F) v ^= 1;                    // any scale but NaN
        if (what == 2) v = static_cast<std::uint8_t>(0x28 + v % 0x28);  // scales of a usual size
        p[i] = v;
    }
}
__device__ std::uint16_t from_float(float v, bool half) {
    return half ? __half_as_ushort(__float2half_rn(v)) : __bfloat16_as_ushort(__float2bfloat16_rn(v));
}
__device__ float to_float(std::uint16_t v, bool half) {
    return half ? __half2float(__ushort_as_half(v)) : __uint_as_float(std::uint32_t{v} << 16);
}
__global__ void fill_x(std::uint16_t* x, std::int64_t m, std::int64_t stride, std::uint32_t seed, int kind, bool half) {
    for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < m * stride;
         i += std::int64_t{gridDim.x} * blockDim.x) {
        const std::uint32_t h = mix(static_cast<std::uint32_t>(i) ^ mix(seed));
        const std::uint32_t r = mix(h + 13);
        std::uint16_t v = from_float(gauss(h), half);
        const std::uint16_t sign = r >> 16 & 0x8000u;
        if (kind == wide) v = from_float(ldexpf(gauss(h), static_cast<int>(r % 60) - 30), half);
        if (kind == huge)
            v = sign | (half ? from_float(60000.0f, true)
                             : from_float(ldexpf(1 + (r >> 8 & 127) / 128.0f, 120 + r % 8), false));
        if (kind == tiny) v = sign | (r % (half ? 0x40 : 0x300));
        if (kind == bits) {
            v = static_cast<std::uint16_t>(r);
            if (!(fabsf(to_float(v, half)) < INFINITY)) v &= 0xBFFFu;
        }
        if (kind == mixed && r % 3 == 0) v = r / 3 % 2 ? sign | (r >> 8) % 0x80 : 0;
        if (kind == not_finite) {
            if (i / stride == 0 && i % stride == 5) v = half ? 0x7C00 : 0x7F80;
            if (i / stride == m - 1 && i % stride == 40) v = 0x7FFF;
        }
        if (kind == zero_rows && i / stride % 3 != 1) v = r & 0x8000u;
        x[i] = v;
    }
}
__global__ void fill_floats(float* p, std::int64_t n, std::uint32_t seed, float size, float least) {
    for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < n;
         i += std::int64_t{gridDim.x} * blockDim.x) {
        const std::uint32_t h = mix(static_cast<std::uint32_t>(i) ^ mix(seed));
        p[i] = (least + (h >> 8) / 16777216.0f) * size * (h % 4 ? 1.0f : -1.0f);
    }
}

struct Verdict {
    unsigned long long bad;
    long long first;
    float worst;
    float got;
    double ref, limit;
};
// A thread an output.
__global__ void compare(const std::uint8_t* b, const std::uint8_t* scales, const std::uint16_t* x, std::int64_t stride,
                        const std::uint16_t* y, std::int64_t m, std::int64_t n, std::int64_t k, float scale2,
                        const float* scale2_rows, const float* bias, bool half, std::int64_t step, Verdict* out) {
    constexpr float e2m1[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    const std::int64_t count = (m * n + step - 1) / step;
    for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * blockDim.x) {
        const std::int64_t token = i * step / n, row = i * step % n;
        double sum = 0, size = 0;
        for (std::int64_t c = 0; c < k; ++c) {
            const std::uint32_t code = b[row * (k / 2) + c / 2] >> (c % 2 * 4) & 15u;
            const std::uint32_t s = scales[row * (k / 16) + c / 16];
            const int e = s >> 3 & 15;
            const double scale =
                (e == 0 ? ldexp(double(s & 7), -9) : ldexp(8.0 + (s & 7), e - 10)) * (s & 128 ? -1 : 1);
            const double w = e2m1[code & 7] * (code & 8 ? -1 : 1) * scale;
            const double product = w * static_cast<double>(to_float(x[token * stride + c], half));
            sum += product;
            size += fabs(product);
        }
        const double s2 = scale2_rows != nullptr ? scale2_rows[row] : scale2;
        const double ref = sum * s2 + (bias != nullptr ? bias[row] : 0.0f);
        const float got = to_float(y[token * n + row], half);
        const double limit =
            (half ? 0x1p-11 : 0x1p-8) * fabs(ref) + 0x1p-15 * fabs(s2) * size + (half ? 0x1p-25 : 0x1p-134);
        const double top = half ? 65520.0 : 0x1p128 - 0x1p119;
        const double error = fabs(static_cast<double>(got) - ref);
        bool good;
        if (!(fabs(ref) < INFINITY))
            good = isnan(ref) ? isnan(got) : static_cast<double>(got) == ref;
        else if (fabs(ref) + limit >= top)
            good = (isinf(got) && (got > 0) == (ref > 0)) || (error <= limit && fabs(ref) - limit < top);
        else
            good = error <= limit;
        if (good && fabs(ref) + limit < top)
            atomicMax(reinterpret_cast<int*>(&out->worst), __float_as_int(float(error / limit)));
        if (!good && atomicAdd(&out->bad, 1ull) == 0) {
            out->first = token * n + row;
            out->got = got;
            out->ref = ref;
            out->limit = limit;
        }
    }
}
__global__ void differences(const std::uint16_t* a, const std::uint16_t* b, std::int64_t count,
                            unsigned long long* out) {
    for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * blockDim.x)
        if (a[i] != b[i]) atomicAdd(out, 1ull);
}

struct Case {
    char kernel;
    std::int64_t n, k, m;
    DType dtype;
    int kind = normal;
    bool rows = false, bias = false, all_scales = true, invariant = false, pdl = true;
    std::int64_t extra_stride = 0;  // elements
    Tuning tuning{};
};
int cases, failures, skipped;

void report(const Case& c, const char* what) {
    ++failures;
    std::printf("FAIL %c n=%lld k=%lld m=%lld %s %s rows=%d bias=%d invariant=%d tuning=%d,%d,%d,%d,%d,%d,%d,%d: %s\n",
                c.kernel, (long long)c.n, (long long)c.k, (long long)c.m, c.dtype == DType::float16 ? "fp16" : "bf16",
                kind_name[c.kind], c.rows, c.bias, c.invariant, c.tuning.v[0], c.tuning.v[1], c.tuning.v[2],
                c.tuning.v[3], c.tuning.v[4], c.tuning.v[5], c.tuning.v[6], c.tuning.v[7], what);
}

// Runs the case twice and compares; keeps y of the first `keep` rows where asked for.
void check(const Case& c, std::uint32_t seed, std::vector<std::uint16_t>* keep = nullptr) {
    ++cases;
    const bool half = c.dtype == DType::float16;
    const std::int64_t stride = c.k + c.extra_stride;
    Buffer b(c.n * c.k / 2), scales(c.n * c.k / 16), x((c.m * stride + 64) * 2), y(c.m * c.n * 2),
        second(c.m * c.n * 2);
    Buffer weight(prepacked::size(c.n, c.k)), scale2(c.n * 4), bias(c.n * 4), verdict(sizeof(Verdict));
    fill_bytes<<<1024, 256>>>(b.as<std::uint8_t>(), b.bytes, 1000 + seed, 0);
    fill_bytes<<<1024, 256>>>(scales.as<std::uint8_t>(), scales.bytes, 2000 + seed, c.all_scales ? 1 : 2);
    x.poison();  // what lies behind the rows is NaN
    fill_x<<<1024, 256>>>(x.as<std::uint16_t>(), c.m, stride, 3000 + seed, c.kind, half);
    if (c.extra_stride > 0) CHECK(cudaMemset2D(x.p + c.k * 2, stride * 2, 0xFF, c.extra_stride * 2, c.m));
    const bool extreme = c.kind == huge || c.kind == bits;
    fill_floats<<<64, 256>>>(scale2.as<float>(), c.n, 4000 + seed, extreme ? (half ? 0x1p-16f : 0x1p-24f) : 1.0f,
                             0.01f);
    fill_floats<<<64, 256>>>(bias.as<float>(), c.n, 5000 + seed, c.kind == normal ? 10.0f : 0.0f, 0.0f);
    weight.poison();
    CHECK(prepack(b.as<std::uint8_t>(), scales.as<std::uint8_t>(), c.n, c.k, weight.as<std::uint8_t>(), nullptr));
    GemmArguments a;
    a.n = c.n;
    a.k = c.k;
    a.m = c.m;
    a.dtype = c.dtype;
    a.x = x.p;
    a.x_row_stride = stride;
    a.prepacked = weight.as<std::uint8_t>();
    a.scale2 = extreme ? (half ? 0x1p-16f : 0x1p-24f) : 0.37f;
    a.scale2_rows = c.rows ? scale2.as<float>() : nullptr;
    a.largest_scale2 = c.rows ? (extreme ? a.scale2 * 1.02f : 1.02f) : a.scale2;
    a.bias = c.bias ? bias.as<float>() : nullptr;
    a.sm_count = sm_count;
    a.max_shared_memory = shared_limit;
    a.kernel_arch = arch;
    a.wgmma = wgmma;
    a.programmatic_launch = c.pdl;
    a.batch_invariant = c.invariant;
    Buffer space(workspace_bytes(c.kernel, a));
    a.workspace = space.p;
    for (Buffer* target : {&y, &second}) {
        target->poison();
        space.poison();
        clear_flags(c.kernel, space.p, a);
        a.y = target->p;
        const cudaError_t e = launch(c.kernel, a, c.tuning);
        // Not for this layer: a tuning, a small layer, or few rows that the wgmma tiles take.
        const bool may_refuse = c.tuning.given() || c.kernel == 's' || (c.kernel == 'm' && gemm_wgmma_supports(a));
        if (e == cudaErrorInvalidConfiguration && may_refuse) {
            ++skipped;
            cudaGetLastError();
            return;
        }
        if (e != cudaSuccess) return report(c, cudaGetErrorString(e));
        CHECK(cudaDeviceSynchronize());
    }
    CHECK(cudaMemset(verdict.p, 0, sizeof(Verdict)));
    differences<<<1024, 256>>>(y.as<std::uint16_t>(), second.as<std::uint16_t>(), c.m * c.n,
                               verdict.as<unsigned long long>());
    unsigned long long different = 0;
    CHECK(cudaMemcpy(&different, verdict.p, 8, cudaMemcpyDeviceToHost));
    if (different != 0) report(c, ("not deterministic at " + std::to_string(different)).c_str());
    CHECK(cudaMemset(verdict.p, 0, sizeof(Verdict)));
    // At most about 2^34 products; a prime step visits every row and token of large cases.
    const std::int64_t step = std::max<std::int64_t>(1, c.m * c.n / ((std::int64_t{1} << 34) / c.k) * 2 + 1);
    compare<<<132 * 16, 128>>>(b.as<std::uint8_t>(), scales.as<std::uint8_t>(), x.as<std::uint16_t>(), stride,
                               y.as<std::uint16_t>(), c.m, c.n, c.k, a.scale2, a.scale2_rows, a.bias, half,
                               c.m * c.n <= (std::int64_t{1} << 34) / c.k ? 1 : step, verdict.as<Verdict>());
    Verdict v;
    CHECK(cudaMemcpy(&v, verdict.p, sizeof v, cudaMemcpyDeviceToHost));
    if (v.bad != 0) {
        char text[200];
        std::snprintf(text, sizeof text, "%llu bad, token %lld row %lld got %g wanted %g +- %g", v.bad,
                      v.first / (long long)c.n, v.first % (long long)c.n, double(v.got), v.ref, v.limit);
        report(c, text);
    }
    if (keep != nullptr) {
        keep->resize(c.n);
        CHECK(cudaMemcpy(keep->data(), y.p, c.n * 2, cudaMemcpyDeviceToHost));
    }
}

// Shapes x types x kinds of x; every tuning of `lines` that has the kernel's letter where given.
void check_all(const char* kernels, const std::vector<Tuning>& tunings, bool small) {
    const std::int64_t shapes[][2] = {{1, 64},     {16, 64},     {17, 128},   {40, 192},    {64, 256},    {129, 320},
                                      {300, 1024}, {1000, 2048}, {1541, 512}, {4096, 1088}, {2200, 4096}, {333, 17408}};
    const std::int64_t rows[] = {1,  3,  8,   9,   15,  16,  17,  24,  31,  33,  48,  50,
                                 64, 65, 100, 128, 129, 200, 256, 257, 300, 515, 1030};
    std::uint32_t seed = 1;
    std::vector<Tuning> all = tunings;
    if (all.empty()) all.push_back({});
    for (const char* kernel = kernels; *kernel != 0; ++kernel)
        for (const auto& shape : shapes)
            for (const std::int64_t m : rows) {
                ++seed;
                if (small && (shape[0] * shape[1] > 400000 || seed % 5 != 0)) continue;
                for (const Tuning& t : all) {
                    ++seed;
                    Case c{*kernel, shape[0], shape[1], m, seed % 2 ? DType::bfloat16 : DType::float16};
                    c.kind = static_cast<int>(seed / 2 % kinds);
                    c.rows = seed / 3 % 2;
                    c.bias = seed / 5 % 2;
                    c.invariant = seed % 7 == 0;
                    c.pdl = seed % 3 != 0;
                    c.extra_stride = seed % 4 == 0 ? 8 * (seed % 9) : 0;
                    c.tuning = t;
                    check(c, seed);
                }
            }
    std::printf("check: %d cases, %d failures, %d skipped\n", cases, failures, skipped);
}

// Row 0 with the same x must have the same bits whatever M is.
void check_invariance(const char* kernels) {
    for (const char* kernel = kernels; *kernel != 0; ++kernel)
        for (const auto& [n, k] :
             {std::pair<int, int>{300, 1024}, {4096, 4096}, {512, 2048}, {2048, 8192}, {9000, 1088}})
            for (const DType dtype : {DType::bfloat16, DType::float16}) {
                std::vector<std::uint16_t> first, other;
                for (const std::int64_t m : {1, 2, 7, 9, 16, 17, 40, 64, 100, 128, 200, 300, 1000}) {
                    Case c{*kernel, n, k, m, dtype};
                    c.all_scales = false;
                    c.invariant = true;
                    check(c, 7, m == 1 ? &first : &other);
                    if (m > 1 && first != other) report(c, "row 0 differs from that of M = 1");
                }
            }
    std::printf("invariance: %d cases, %d failures\n", cases, failures);
}

// ---- timing
double median_us(int layers, int replays, const std::function<void(int, cudaStream_t)>& body) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int l = 0; l < layers; ++l) body(l, stream);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    std::vector<cudaEvent_t> events(replays + 1);
    for (auto& e : events) CHECK(cudaEventCreate(&e));
    for (int i = 0; i < 2; ++i) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(events[0], stream));
    for (int i = 0; i < replays; ++i) {
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaEventRecord(events[i + 1], stream));
    }
    CHECK(cudaStreamSynchronize(stream));
    std::vector<float> ms(replays);
    for (int i = 0; i < replays; ++i) CHECK(cudaEventElapsedTime(&ms[i], events[i], events[i + 1]));
    std::sort(ms.begin(), ms.end());
    for (auto& e : events) cudaEventDestroy(e);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    return ms[replays / 2] * 1e3 / layers;
}

// Lines of stdin: N K M kernel(w|m|g|d = dense) type(b|h) pdl tuning...; a dense line for every (N, K, M, type) goes
// well beside the others: they run one after the other, so the clock is the same.
void bench() {
    constexpr std::size_t pool_bytes = std::size_t{1} << 30;  // the largest dense weight here has 1.0e9 bytes
    constexpr std::size_t cublas_bytes = std::size_t{32} << 20;
    Buffer pool(pool_bytes + (64 << 20)), x(std::size_t{8192} * 17408 * 2), cublas(cublas_bytes);
    fill_bytes<<<4096, 256>>>(pool.as<std::uint8_t>(), pool.bytes, 5, 1);
    std::size_t y_bytes = 0;
    char* y = nullptr;
    char* space = nullptr;
    std::size_t space_bytes = 0;
    Buffer dense_pool(pool_bytes);
    fill_x<<<4096, 256>>>(dense_pool.as<std::uint16_t>(), 1, pool_bytes / 2, 9, normal, false);
    char line[256];
    double dense = 0;
    if (cublaslt::available())
        cublaslt::prepare_device();
    else
        std::printf("no dense figures: %s\n", cublaslt::unavailable_reason().c_str());
    while (std::fgets(line, sizeof line, stdin) != nullptr) {
        long long n, k, m;
        char kernel, type;
        int pdl;
        Tuning t;
        if (std::sscanf(line, "%lld %lld %lld %c %c %d %d %d %d %d %d %d %d %d", &n, &k, &m, &kernel, &type, &pdl,
                        &t.v[0], &t.v[1], &t.v[2], &t.v[3], &t.v[4], &t.v[5], &t.v[6], &t.v[7]) < 6)
            continue;
        const bool half = type == 'h';
        fill_x<<<1024, 256>>>(x.as<std::uint16_t>(), m, k, 11, normal, half);
        if (y_bytes < static_cast<std::size_t>(m * n * 2)) {
            cudaFree(y);
            y_bytes = m * n * 2;
            CHECK(cudaMalloc(&y, y_bytes + 64));
        }
        GemmArguments a;
        a.n = n;
        a.k = k;
        a.m = m;
        a.dtype = half ? DType::float16 : DType::bfloat16;
        a.x = x.p;
        a.x_row_stride = k;
        a.y = y;
        a.scale2 = a.largest_scale2 = 0x1p-12f;
        a.sm_count = sm_count;
        a.max_shared_memory = shared_limit;
        a.kernel_arch = arch;
        a.wgmma = wgmma;
        a.programmatic_launch = pdl % 2 != 0;
        a.batch_invariant = pdl >= 2;
        if (const std::size_t bytes = workspace_bytes(kernel, a); bytes > space_bytes) {
            cudaFree(space);
            CHECK(cudaMalloc(&space, bytes));
            space_bytes = bytes;
        }
        a.workspace = space;
        clear_flags(kernel, space, a);
        const std::size_t bytes = kernel == 'd' ? static_cast<std::size_t>(n) * k * 2 : prepacked::size(n, k);
        std::size_t layers = std::clamp<std::size_t>((300u << 20) / bytes + 1, 1, pool_bytes / bytes);
        if (bytes < 1 << 20) layers = std::min<std::size_t>(layers, 600);
        if (m >= 1024) layers = std::min<std::size_t>(layers, 8);
        const double flops = 2.0 * n * k * m;
        const int replays = flops * layers > 2e12 ? 7 : 15;
        bool refused = false;
        const double us = median_us(static_cast<int>(layers), replays, [&](int layer, cudaStream_t stream) {
            if (kernel == 'd') {
                if (!cublaslt::available()) {
                    refused = true;
                    return;
                }
                cublaslt::Matmul p;
                p.m = m;
                p.n = n;
                p.k = k;
                p.in = p.out = a.dtype;
                p.x = a.x;
                p.ldx = k;
                p.w = dense_pool.p + layer * bytes;
                p.ldw = k;
                p.d = y;
                p.ldd = n;
                p.workspace = cublas.p;
                p.workspace_bytes = cublas_bytes;
                p.stream = stream;
                cublaslt::matmul(p);
                return;
            }
            a.prepacked = pool.as<std::uint8_t>() + layer * bytes;
            a.stream = stream;
            if (launch(kernel, a, t) != cudaSuccess) refused = true;
        });
        cudaGetLastError();
        if (kernel == 'd') dense = us;
        std::printf("%lldx%lld M=%lld %c %c pdl=%d [%d %d %d %d %d %d]: ", n, k, m, kernel, type, pdl, t.v[0], t.v[1],
                    t.v[2], t.v[3], t.v[4], t.v[5]);
        if (refused)
            std::printf("refused\n");
        else
            std::printf("%.2f us, %.0f %% of 4.4 TB/s, %.0f TFLOP/s, dense/ours %.2f\n", us, bytes / us / 4.4e4,
                        flops / us / 1e6, dense / us);
        std::fflush(stdout);
    }
    cudaFree(y);
    cudaFree(space);
}

}  // namespace

int main(int argc, char** argv) {
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    sm_count = properties.multiProcessorCount;
    shared_limit = static_cast<int>(properties.sharedMemPerBlockOptin);
    CHECK(gemv_tensor_core_kernel_arch(&arch));
    CHECK(gemm_wgmma_compiled(&wgmma));
    const std::string what = argc > 1 ? argv[1] : "";
    const char* kernels = argc > 2 ? argv[2] : "w";
    if (const char* limit = std::getenv("SHARED_LIMIT")) shared_limit = std::atoi(limit);
    if (what == "bench")
        bench();
    else if (what == "check" || what == "small") {
        // Tunings: lines of numbers on a file given as the third argument.
        std::vector<Tuning> tunings;
        if (argc > 3)
            if (std::FILE* f = std::fopen(argv[3], "r")) {
                char line[256];
                while (std::fgets(line, sizeof line, f) != nullptr) {
                    Tuning t;
                    if (std::sscanf(line, "%d %d %d %d %d %d %d %d", &t.v[0], &t.v[1], &t.v[2], &t.v[3], &t.v[4],
                                    &t.v[5], &t.v[6], &t.v[7]) >= 1)
                        tunings.push_back(t);
                }
                std::fclose(f);
            }
        check_all(kernels, tunings, what == "small");
    } else if (what == "invariance")
        check_invariance(kernels);
    else {
        std::printf("harness check|small|invariance KERNELS [TUNINGS] | bench < lines\n");
        return 2;
    }
    return failures != 0;
}
