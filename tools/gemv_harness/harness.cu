// The decode kernels alone: correctness against an fp64 host reference, and timing by graph replays over distinct
// weights.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/prepacked.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/float16.h"

using namespace fp4linear;
using namespace fp4linear::cuda;
#define CHECK(e)                                                                                     \
    do {                                                                                             \
        cudaError_t err_ = (e);                                                                      \
        if (err_) {                                                                                  \
            printf("CUDA error %s at %s:%d %s\n", cudaGetErrorString(err_), __FILE__, __LINE__, #e); \
            exit(1);                                                                                 \
        }                                                                                            \
    } while (0)

static float to_f(DType t, std::uint16_t v) { return t == DType::float16 ? float_from_half(v) : float_from_bfloat(v); }
static std::uint16_t from_f(DType t, float v) {
    return t == DType::float16 ? half_from_float(v) : bfloat_from_float(v);
}

struct Buffer {
    void* p = nullptr;
    size_t n;
    explicit Buffer(size_t bytes) : n(bytes) { CHECK(cudaMalloc(&p, bytes + 64)); }
    ~Buffer() { cudaFree(p); }
    void up(const void* h) { CHECK(cudaMemcpy(p, h, n, cudaMemcpyHostToDevice)); }
    void down(void* h) { CHECK(cudaMemcpy(h, p, n, cudaMemcpyDeviceToHost)); }
};

enum XKind { normal, wide, huge, tiny, bits, mixed_zero, with_inf, kinds };
static const char* kind_name[] = {"normal", "wide", "huge", "tiny", "bits", "mixed", "inf/nan"};
static std::atomic<int> failures{0}, checks{0};

static int arch = 90, shared_limit = 232448;
static GemvTensorCoreTuning coded_(int un, int m, int groups, int stages, int early) {
    if (un == 0) return {};
    if (un > 100) return {un - 100, 0, 0, groups, stages, 0};
    if (un == 7 || un == 10) return {un, un, 1, groups, stages, early};
    if (un == 9) return {9, 3, 1, groups, stages, early};
    if (un == 12) return {12, 4, 2, groups, stages, early};
    if (un == 48) return {8, 4, 2, groups, stages, early};
    if (un == 50) return {10, 10, 2, groups, stages, early};
    if (un == 40) return {8, 8, 1, groups, stages, early};
    if (un == 39) return {9, 9, 1, groups, stages, early};
    if (un == 18) return {8, 4, 1, groups, stages, early};
    if (un == 38) return {8, 8, 1, groups, stages, early};
    if (un == 20) return {20, 4, 1, groups, stages, early};
    return {un, un <= 5 ? un : 4, m == 1 ? 2 : 1, groups, stages, early};
}
static GemvTensorCoreTuning coded(int un, int m, int groups, int stages, int early, int cluster = 1) {
    GemvTensorCoreTuning t = coded_(un, m, groups, stages, early);
    t.cluster = cluster;
    return t;
}
struct Case {
    int n, k, m;
    DType t;
    XKind kind;
    bool rows, bias;
    int offset;
    bool scalar;
    GemvTensorCoreTuning tuning;
    bool all_scales;
    int sms = 132;
};

static void check(const Case& c, unsigned seed) {
    std::mt19937_64 rng(seed);
    auto u = [&] { return std::uint32_t(rng()); };
    std::normal_distribution<float> gauss;
    const int blocks = c.k / 16;
    std::vector<std::uint8_t> b(size_t(c.n) * c.k / 2), s(size_t(c.n) * blocks);
    for (auto& v : b) v = u();
    for (auto& v : s) {
        if (c.all_scales) {
            do v = u();
            while (is_e4m3_nan(v));
        } else
            v = 0x28 + u() % 0x28;
    }
    const int stride = c.m == 1 ? c.k : c.k + (c.offset ? 3 : 8);
    std::vector<std::uint16_t> x(size_t(c.m) * stride + 8), y(size_t(c.m) * c.n), y2(y.size()), y3(y.size());
    for (auto& v : x) {
        switch (c.kind) {
            case wide: v = from_f(c.t, std::ldexp(gauss(rng), int(u() % 60) - 30)); break;
            case huge:
                v = c.t == DType::float16
                        ? from_f(c.t, 60000 * (u() % 2 ? 1.f : -1.f))
                        : from_f(c.t, std::ldexp(1 + (u() % 128) / 128.f, 120 + u() % 8) * (u() % 2 ? 1 : -1));
                break;
            case tiny: v = (u() & 0x8000) | (u() % (c.t == DType::float16 ? 0x40 : 0x300)); break;
            case bits:
                do v = u();
                while (!std::isfinite(to_f(c.t, v)));
                break;
            case mixed_zero:
                v = u() % 3 == 0 ? 0 : u() % 5 == 0 ? (u() & 0x8000) | (u() % 0x80) : from_f(c.t, gauss(rng));
                break;
            default: v = from_f(c.t, gauss(rng));
        }
    }
    if (c.kind == with_inf) {
        x[5 % c.k] = c.t == DType::float16 ? 0x7C00 : 0x7F80;
        if (c.m > 1) x[stride + 3] = 0x7FFF;
    }
    std::vector<float> scale2(c.n), bias(c.n);
    for (auto& v : scale2)
        v = c.kind == huge || c.kind == bits ? std::ldexp(1.f + (u() % 64) / 64.f, c.t == DType::float16 ? -16 : -24)
                                             : 0.001f * (1 + u() % 1000) * (u() % 4 ? 1 : -1);
    for (auto& v : bias) v = c.kind == normal ? gauss(rng) * 10 : 0.f;
    Buffer db(b.size()), ds(s.size()), dx((x.size()) * 2 + 16), dy(y.size() * 2),
        dw(std::max<size_t>(prepacked::size(c.n, c.k), 16)), dsc(4 * c.n), dbi(4 * c.n);
    db.up(b.data());
    ds.up(s.data());
    dsc.up(scale2.data());
    dbi.up(bias.data());
    CHECK(cudaMemcpy((char*)dx.p + 2 * c.offset, x.data(), x.size() * 2, cudaMemcpyHostToDevice));
    if (c.k % 64 == 0) {
        CHECK(cudaMemset(dw.p, 0xEE, dw.n));
        CHECK(prepack((std::uint8_t*)db.p, (std::uint8_t*)ds.p, c.n, c.k, (std::uint8_t*)dw.p, 0));
        Buffer ub(b.size()), us(s.size());
        CHECK(cudaMemset(ub.p, 0xEE, ub.n));
        CHECK(cudaMemset(us.p, 0xEE, us.n));
        CHECK(unpack((std::uint8_t*)dw.p, c.n, c.k, (std::uint8_t*)ub.p, (std::uint8_t*)us.p, 0));
        std::vector<std::uint8_t> hb(b.size()), hs(s.size());
        ub.down(hb.data());
        us.down(hs.data());
        checks++;
        if (hb != b || hs != s) {
            failures++;
            printf("FAIL unpack n=%d k=%d\n", c.n, c.k);
        }
        Buffer dq(size_t(c.n) * c.k * 2);
        std::vector<std::uint16_t> hq(size_t(c.n) * c.k);
        CHECK(cudaMemset(dq.p, 0xFF, dq.n));
        CHECK(dequantize_prepacked((std::uint8_t*)dw.p, c.k, 0, c.n, c.t, dq.p, 0));
        dq.down(hq.data());
        int bad = 0;
        for (int r = 0; r < c.n; ++r)
            for (int k = 0; k < c.k; ++k) {
                float w = float_from_e2m1(e2m1_code(&b[size_t(r) * c.k / 2], k)) *
                          float_from_e4m3(s[size_t(r) * blocks + k / 16]);
                if (!(to_f(c.t, hq[size_t(r) * c.k + k]) == w)) ++bad;
            }
        checks++;
        if (bad) {
            failures++;
            printf("FAIL dequantize %d\n", bad);
        }
    }
    GemvArguments a;
    a.n = c.n;
    a.k = c.k;
    a.m = c.m;
    a.dtype = c.t;
    a.x = (char*)dx.p + 2 * c.offset;
    a.x_row_stride = stride;
    a.y = dy.p;
    a.prepacked = (std::uint8_t*)dw.p;
    a.b = (std::uint8_t*)db.p;
    a.scales = (std::uint8_t*)ds.p;
    a.scale2 = scale2[0];
    a.scale2_rows = c.rows ? (float*)dsc.p : nullptr;
    a.bias = c.bias ? (float*)dbi.p : nullptr;
    a.sm_count = c.sms;
    a.kernel_arch = arch;
    a.max_shared_memory = shared_limit;
    Buffer space(gemv_tensor_core_workspace(c.n, c.k, shared_limit));
    CHECK(cudaMemset(space.p, 0xFF, space.n + 64));
    a.workspace = space.p;
    auto go = [&](std::vector<std::uint16_t>& out, int tile) {
        CHECK(cudaMemset(dy.p, 0xFF, dy.n));
        const cudaError_t launched = c.scalar ? gemv_scalar(a, tile) : gemv_tensor_core(a, c.tuning);
        if (launched == cudaErrorInvalidConfiguration && c.tuning.units != 0) return false;  // does not fit
        CHECK(launched);
        CHECK(cudaDeviceSynchronize());
        dy.down(out.data());
        return true;
    };
    if (!go(y, 0)) return;
    go(y2, 0);
    checks++;
    if (y != y2) {
        failures++;
        printf("FAIL not deterministic\n");
    }
    if (c.scalar)
        for (int tile : {1, 2, 4}) {
            go(y3, tile);
            checks++;
            if (y3 != y) {
                failures++;
                printf("FAIL tiling %d differs\n", tile);
            }
        }
    // reference
    const double unit = c.t == DType::float16 ? 0x1p-11 : 0x1p-8;
    double worst = 0;
    int bad = 0;
    std::string first;
    std::vector<double> xs(x.size());
    for (size_t j = 0; j < x.size(); ++j) xs[j] = to_f(c.t, x[j]);
    std::vector<double> ws(c.k);
    for (int r = 0; r < c.n; ++r) {
        for (int k = 0; k < c.k; ++k)
            ws[k] = double(float_from_e2m1(e2m1_code(&b[size_t(r) * c.k / 2], k))) *
                    float_from_e4m3(s[size_t(r) * blocks + k / 16]);
        for (int m = 0; m < c.m; ++m) {
            double sum = 0, mag = 0;
            for (int k = 0; k < c.k; ++k) {
                const double w = ws[k], v = xs[size_t(m) * stride + k];
                sum += w * v;
                mag += std::fabs(w * v);
            }
            const double s2 = c.rows ? scale2[r] : scale2[0];
            const double ref = sum * s2 + (c.bias ? bias[r] : 0), size = std::fabs(s2) * mag + (c.bias ? 0 : 0);
            const double got = to_f(c.t, y[size_t(m) * c.n + r]);
            double limit = unit * std::fabs(ref) + 0x1p-15 * size + (c.t == DType::float16 ? 0x1p-25 : 0x1p-134);
            const double top = c.t == DType::float16 ? 65504. : 3.3895313892515355e38;
            bool ok;
            if (!std::isfinite(ref))
                ok = !std::isfinite(got);
            else if (std::fabs(ref) + limit > top)
                ok = std::isinf(got) || std::fabs(got - ref) <= limit;
            else
                ok = std::fabs(got - ref) <= limit;
            if (ok && std::isfinite(got) && std::isfinite(ref)) worst = std::max(worst, std::fabs(got - ref) / limit);
            if (!ok && bad++ == 0) {
                char t[160];
                snprintf(t, sizeof t, "n=%d m=%d got %g ref %g limit %g", r, m, got, ref, limit);
                first = t;
            }
        }
    }
    checks++;
    if (bad) failures++;
    if (bad)
        printf("FAIL %s %s n=%d k=%d m=%d %s rows=%d bias=%d off=%d units=%d worst %.3f bad %d %s\n",
               c.scalar ? "scalar" : "tc", name_of(c.t), c.n, c.k, c.m, kind_name[c.kind], c.rows, c.bias, c.offset,
               c.tuning.units, worst, bad, first.c_str());
}

static void correctness(bool small) {
    unsigned seed = 1;
    std::vector<std::pair<Case, unsigned>> cases;
    auto check = [&](const Case& c, unsigned s) { cases.push_back({c, s}); };
    const int shapes[][2] = {{16, 64},   {1, 128},   {17, 192},   {40, 256},  {48, 640},  {300, 1024}, {33, 2048},
                             {96, 4096}, {40, 5120}, {2200, 512}, {35, 8192}, {64, 1088}, {50, 8256},  {33, 17408}};
    int i = 0;
    for (auto& sh : shapes)
        for (DType t : {DType::bfloat16, DType::float16})
            for (int kind = 0; kind < kinds; ++kind)
                for (int m : {1, 2, 5, 8}) {
                    ++i;
                    if (small && (i % 5 != 0 || sh[0] * sh[1] > 100000)) continue;
                    if (sh[0] * sh[1] > 300000 && kind > 1 && m != 1 && m != 8) continue;
                    Case c{sh[0], sh[1], m,   t, XKind(kind), i % 2 == 0, i % 3 == 0, i % 4 == 0 ? 1 : 0,
                           false, {},    true};
                    if (kind == bits || kind == huge) c.bias = false;
                    check(c, seed++);
                    for (int code : {1, 2, 4, 5, 8, 18, 38, 20}) {
                        if (m == 1 ? code == 1 || code == 5 : code >= 18) continue;
                        const GemvTensorCoreTuning t = coded(code, m, 1 + i % 3, 2 + i % 3, i % 3);
                        if ((sh[1] / 64 + t.units - 1) / t.units > 16 || (i + code) % 3) continue;
                        Case d = c;
                        d.tuning = t;
                        d.sms = i % 2 ? 3 + i % 11 : 132;
                        check(d, seed++);
                    }
                    for (int code : {1, 2, 4, 5, 7, 8, 9, 18, 38, 10, 20})
                        for (int cluster : {2, 4, 3}) {
                            if (arch < 90 || (i + code + cluster) % 3 ||
                                (sh[0] * sh[1] > 300000 && (i + code + cluster) % 2))
                                continue;
                            const GemvTensorCoreTuning t = coded(code, m, 1, 2 + i % 2, i % 3, cluster);
                            if (t.units * 16 * cluster * 64 < sh[1]) continue;
                            Case d = c;
                            d.tuning = t;
                            d.sms = i % 2 ? 4 + i % 11 : 132;
                            check(d, seed++);
                        }
                    for (int code : {102, 104})
                        for (int warps : {4, 8, 16}) {
                            if ((i + code + warps / 4) % 3 || (code - 100) * warps * 64 < sh[1]) continue;
                            Case d = c;
                            d.tuning = coded(code, m, warps, i % 5, 0);
                            check(d, seed++);
                        }
                    if (i % 2) {
                        Case d = c;
                        d.scalar = true;
                        check(d, seed++);
                    }
                }
    for (int k : {32, 96, 4128})
        for (DType t : {DType::bfloat16, DType::float16})
            for (int kind = 0; kind < kinds; ++kind)
                for (int m : {1, 3, 8}) {
                    Case c{37, k, m, t, XKind(kind), false, false, kind % 2, true, {}, true};
                    if (small && m != 3) continue;
                    check(c, seed++);
                }
    std::atomic<size_t> next{0};
    std::vector<std::thread> pool;
    for (unsigned t = 0; t < (small ? 1u : std::min(16u, std::thread::hardware_concurrency())); ++t)
        pool.emplace_back([&] {
            for (size_t j; (j = next++) < cases.size();) ::check(cases[j].first, cases[j].second);
        });
    for (auto& t : pool) t.join();
    printf("correctness: %d cases, %d checks, %d failures\n", int(cases.size()), checks.load(), failures.load());
}

// ---- timing
static void* workspace;
static double time_layers(int n, int k, int m, DType t, GemvTensorCoreTuning tuning, bool pdl, size_t total_bytes,
                          bool scalar, int replays, std::uint8_t* pool, size_t pool_bytes, void* x, void* y) {
    const size_t bytes = scalar ? size_t(n) * k / 2 + size_t(n) * k / 16 : prepacked::size(n, k);
    int layers = int(std::max<size_t>(1, (total_bytes + bytes - 1) / bytes));
    if (bytes < (1u << 20)) layers = std::min(layers, 600);
    layers = int(std::max<size_t>(std::min<size_t>(layers, pool_bytes / bytes), 1));
    cudaStream_t st;
    CHECK(cudaStreamCreate(&st));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal));
    for (int l = 0; l < layers; ++l) {
        GemvArguments a;
        a.n = n;
        a.k = k;
        a.m = m;
        a.dtype = t;
        a.x = x;
        a.x_row_stride = k;
        a.y = y;
        a.prepacked = pool + size_t(l) * bytes;
        a.b = pool + size_t(l) * bytes;
        a.scales = a.b + size_t(n) * k / 2;
        a.scale2 = 0.01f;
        a.sm_count = 132;
        a.kernel_arch = arch;
        a.programmatic_launch = pdl;
        a.stream = st;
        a.workspace = workspace;
        cudaError_t e = scalar ? gemv_scalar(a) : gemv_tensor_core(a, tuning);
        if (e) {
            cudaStreamEndCapture(st, &graph);
            cudaGetLastError();
            cudaStreamDestroy(st);
            return -1;
        }
    }
    CHECK(cudaStreamEndCapture(st, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    std::vector<cudaEvent_t> ev(replays + 1);
    for (auto& e : ev) CHECK(cudaEventCreate(&e));
    for (int i = 0; i < 2; ++i) CHECK(cudaGraphLaunch(exec, st));
    CHECK(cudaEventRecord(ev[0], st));
    for (int i = 0; i < replays; ++i) {
        CHECK(cudaGraphLaunch(exec, st));
        CHECK(cudaEventRecord(ev[i + 1], st));
    }
    CHECK(cudaStreamSynchronize(st));
    std::vector<float> ms(replays);
    for (int i = 0; i < replays; ++i) CHECK(cudaEventElapsedTime(&ms[i], ev[i], ev[i + 1]));
    std::sort(ms.begin(), ms.end());
    for (auto& e : ev) cudaEventDestroy(e);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(st);
    return ms[replays / 2] * 1e3 / layers;
}

__global__ void fill(std::uint32_t* p, size_t n, std::uint32_t seed) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
        std::uint32_t h = std::uint32_t(i) * 2654435761u + seed;
        h ^= h >> 15;
        h *= 2246822519u;
        h ^= h >> 13;
        h *= 3266489917u;
        h ^= h >> 16;
        p[i] = h;
    }
}
__global__ void clear_bit(std::uint32_t* p, size_t n) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
        p[i] &= 0xEFEFEFEFu;
}  // no NaN scale bytes
// what 0: nothing after the wait; 1: a store; 2: load, barrier, store
__global__ void floor_kernel(int what, const std::uint32_t* x, std::uint32_t* y) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (what == 1 && threadIdx.x < 16) y[blockIdx.x * 16 + threadIdx.x] = 1;
    if (what == 2) {
        __shared__ std::uint32_t s[512];
        s[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        if (threadIdx.x < 16) y[blockIdx.x * 16 + threadIdx.x] = s[threadIdx.x ^ 8];
    }
}
// Does the prologue of a kernel overlap more than one kernel before it? before / after: cycles around the wait.
__global__ void spin_kernel(int before, int after) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const long long start = clock64();
    while (clock64() - start < before) {
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const long long middle = clock64();
    while (clock64() - middle < after) {
    }
}
__global__ void read_kernel(const uint4* p, size_t n, unsigned* out) {
    unsigned s = 0;
    size_t step = size_t(gridDim.x) * blockDim.x;
    size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 a = __ldcs(p + i), b = __ldcs(p + i + step), c = __ldcs(p + i + 2 * step), d = __ldcs(p + i + 3 * step);
        s ^= a.x ^ b.y ^ c.z ^ d.w;
    }
    if (s == 0x12345) *out = s;
}

struct Block {  // as large as a kernel's own parameters
    std::uint64_t words[20];
};
__global__ void empty_kernel(const __grid_constant__ Block) {}

// Host time of a launch of a kernel that does nothing: what no call can go below.
void launch_cost() {
    constexpr int batch = 100, batches = 200;
    CHECK(cudaFuncSetAttribute(empty_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10));
    cudaStream_t own = nullptr;
    CHECK(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
    const Block parameters{};
    for (const cudaStream_t stream : {cudaStream_t{}, own})
        for (const int shared : {0, 100 << 10})
            for (const int attributes : {-1, 0, 1}) {  // -1: <<<>>>
                std::vector<double> us;
                for (int i = 0; i < batches; ++i) {
                    const auto start = std::chrono::steady_clock::now();
                    for (int j = 0; j < batch; ++j) {
                        cudaLaunchConfig_t c{};
                        c.gridDim = dim3(8);
                        c.blockDim = dim3(256);
                        c.dynamicSmemBytes = shared;
                        c.stream = stream;
                        cudaLaunchAttribute at{};
                        at.id = cudaLaunchAttributeProgrammaticStreamSerialization;
                        at.val.programmaticStreamSerializationAllowed = 1;
                        c.attrs = &at;
                        c.numAttrs = attributes == 1;
                        if (attributes < 0)
                            empty_kernel<<<8, 256, shared, stream>>>(parameters);
                        else
                            CHECK(cudaLaunchKernelEx(&c, empty_kernel, parameters));
                    }
                    us.push_back(
                        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() /
                        batch);
                    CHECK(cudaGetLastError());
                    CHECK(cudaDeviceSynchronize());
                }
                std::nth_element(us.begin(), us.begin() + batches / 2, us.end());
                printf("launch stream=%s shared=%d %s: %.2f us\n", stream == nullptr ? "default" : "own", shared,
                       attributes < 0    ? "<<<>>>"
                       : attributes == 0 ? "cudaLaunchKernelEx"
                                         : "with PDL",
                       us[batches / 2]);
            }
}

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "check";
    CHECK(gemv_tensor_core_kernel_arch(&arch));
    if (argc > 2) shared_limit = atoi(argv[2]);
    printf("kernels of SM%d, %d bytes of shared memory\n", arch, shared_limit);
    if (mode == "check") {
        correctness(false);
        return failures != 0;
    }
    if (mode == "small") {
        correctness(true);
        return failures != 0;
    }
    if (mode == "launch") {
        launch_cost();
        return 0;
    }
    const size_t pool_bytes = size_t(2) << 30;
    std::uint8_t* pool;
    CHECK(cudaMalloc(&pool, pool_bytes));
    void *x, *y;
    CHECK(cudaMalloc(&x, 1 << 22));
    CHECK(cudaMalloc(&workspace, 16 << 20));
    CHECK(cudaMalloc(&y, 1 << 24));
    fill<<<1024, 256>>>((std::uint32_t*)pool, pool_bytes / 4, 7u);
    {
        std::vector<std::uint16_t> hx(1 << 21);
        std::mt19937 r(3);
        std::normal_distribution<float> g;
        for (auto& v : hx) v = bfloat_from_float(g(r));
        CHECK(cudaMemcpy(x, hx.data(), hx.size() * 2, cudaMemcpyHostToDevice));
    }
    CHECK(cudaDeviceSynchronize());
    if (mode == "floor") {
        for (int blocks : {32, 132})
            for (int threads : {64, 256, 512})
                for (int what = 0; what < 3; ++what) {
                    cudaStream_t st;
                    CHECK(cudaStreamCreate(&st));
                    cudaGraph_t graph;
                    cudaGraphExec_t exec;
                    CHECK(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal));
                    for (int l = 0; l < 500; ++l) {
                        cudaLaunchConfig_t c{};
                        c.gridDim = dim3(blocks);
                        c.blockDim = dim3(threads);
                        c.stream = st;
                        cudaLaunchAttribute at{};
                        at.id = cudaLaunchAttributeProgrammaticStreamSerialization;
                        at.val.programmaticStreamSerializationAllowed = 1;
                        c.attrs = &at;
                        c.numAttrs = 1;
                        CHECK(cudaLaunchKernelEx(&c, floor_kernel, what, (const std::uint32_t*)x, (std::uint32_t*)y));
                    }
                    CHECK(cudaStreamEndCapture(st, &graph));
                    CHECK(cudaGraphInstantiate(&exec, graph, 0));
                    cudaEvent_t a, b;
                    cudaEventCreate(&a);
                    cudaEventCreate(&b);
                    float best = 1e9;
                    for (int i = 0; i < 10; ++i) {
                        cudaEventRecord(a, st);
                        CHECK(cudaGraphLaunch(exec, st));
                        cudaEventRecord(b, st);
                        CHECK(cudaStreamSynchronize(st));
                        float ms;
                        cudaEventElapsedTime(&ms, a, b);
                        best = std::min(best, ms);
                    }
                    printf("floor blocks=%d threads=%d what=%d: %.2f us\n", blocks, threads, what, best * 2);
                }
        return 0;
    }
    if (mode == "spin") {
        for (int blocks : {32, 128})
            for (int threads : {256, 512})
                for (int after : {0, 500})
                    for (int before : {0, 500, 1000, 2000, 4000}) {
                        cudaStream_t st;
                        CHECK(cudaStreamCreate(&st));
                        cudaGraph_t graph;
                        cudaGraphExec_t exec;
                        CHECK(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal));
                        for (int l = 0; l < 500; ++l) {
                            cudaLaunchConfig_t c{};
                            c.gridDim = dim3(blocks);
                            c.blockDim = dim3(threads);
                            c.stream = st;
                            cudaLaunchAttribute at{};
                            at.id = cudaLaunchAttributeProgrammaticStreamSerialization;
                            at.val.programmaticStreamSerializationAllowed = 1;
                            c.attrs = &at;
                            c.numAttrs = 1;
                            CHECK(cudaLaunchKernelEx(&c, spin_kernel, before, after));
                        }
                        CHECK(cudaStreamEndCapture(st, &graph));
                        CHECK(cudaGraphInstantiate(&exec, graph, 0));
                        cudaEvent_t a, b;
                        cudaEventCreate(&a);
                        cudaEventCreate(&b);
                        float best = 1e9;
                        for (int i = 0; i < 6; ++i) {
                            cudaEventRecord(a, st);
                            CHECK(cudaGraphLaunch(exec, st));
                            cudaEventRecord(b, st);
                            CHECK(cudaStreamSynchronize(st));
                            float ms;
                            cudaEventElapsedTime(&ms, a, b);
                            best = std::min(best, ms);
                        }
                        printf("spin blocks=%d threads=%d after=%d before=%d: %.2f us\n", blocks, threads, after,
                               before, best * 2);
                    }
        return 0;
    }
    if (mode == "qwen") {
        struct Choice {
            GemvTensorCoreTuning a, b;
            int ablate;
        };
        std::vector<Choice> choices{{{}, {}, 0}};
        if (argc > 3) {
            int a1, a2, a3, a4, b1, b2, b3, b4;
            while (scanf("%d %d %d %d %d %d %d %d", &a1, &a2, &a3, &a4, &b1, &b2, &b3, &b4) == 8)
                choices.push_back({coded(100 + a1, 4, a2, a4, 0, a3), coded(100 + b1, 4, b2, b4, 0, b3), 0});
        }
        for (const Choice& choice : choices)
            for (int m : {1, 4, 8}) {
                setenv("ABLATE", std::to_string(choice.ablate).c_str(), 1);
                cudaStream_t st;
                CHECK(cudaStreamCreate(&st));
                cudaGraph_t graph;
                cudaGraphExec_t exec;
                CHECK(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal));
                size_t at = 0;
                auto layer = [&](int n, int k, const GemvTensorCoreTuning& tuning) {
                    GemvArguments a;
                    a.n = n;
                    a.k = k;
                    a.m = m;
                    a.x = x;
                    a.x_row_stride = k;
                    a.y = y;
                    a.prepacked = pool + at;
                    at += prepacked::size(n, k);
                    a.sm_count = 132;
                    a.kernel_arch = arch;
                    a.stream = st;
                    CHECK(gemv_tensor_core(a, tuning));
                };
                for (int i = 0; i < 40; ++i) {
                    layer(512, 2048, choice.a);
                    layer(512, 2048, choice.a);
                    layer(2048, 512, choice.b);
                }
                layer(248320, 2048, {});
                CHECK(cudaStreamEndCapture(st, &graph));
                CHECK(cudaGraphInstantiate(&exec, graph, 0));
                std::vector<float> t;
                cudaEvent_t a, b;
                cudaEventCreate(&a);
                cudaEventCreate(&b);
                for (int i = 0; i < 30; ++i) {
                    cudaEventRecord(a, st);
                    CHECK(cudaGraphLaunch(exec, st));
                    cudaEventRecord(b, st);
                    CHECK(cudaStreamSynchronize(st));
                    float ms;
                    cudaEventElapsedTime(&ms, a, b);
                    t.push_back(ms * 1e3f);
                }
                std::sort(t.begin(), t.end());
                printf("qwen3.6 step, 121 layers, %d.%d.%d.%d / %d.%d.%d.%d, M=%d: %.1f us\n", choice.a.units,
                       choice.a.groups, choice.a.cluster, choice.a.stages, choice.b.units, choice.b.groups,
                       choice.b.cluster, choice.b.stages, m, t[15]);
            }
        return 0;
    }
    // read ceiling
    {
        cudaEvent_t a, b;
        cudaEventCreate(&a);
        cudaEventCreate(&b);
        float best = 1e9;
        for (int i = 0; i < 8; ++i) {
            cudaEventRecord(a);
            read_kernel<<<132 * 8, 512>>>((uint4*)pool, pool_bytes / 16, (unsigned*)y);
            cudaEventRecord(b);
            cudaEventSynchronize(b);
            float ms;
            cudaEventElapsedTime(&ms, a, b);
            best = std::min(best, ms);
        }
        printf("read ceiling %.2f TB/s on 2 GiB\n", pool_bytes / best * 1e-9);
    }
    // lines from stdin: n k m units groups stages blocks pdl kind(b/h/s)
    int n, k, m, un, gr, stg, bl, pdl, early, split;
    char kd;
    while (scanf("%d %d %d %d %d %d %d %d %d %d %c", &n, &k, &m, &un, &gr, &stg, &bl, &pdl, &early, &split, &kd) ==
           11) {
        static bool sane = false;
        if (kd == 's' && !sane) {
            sane = true;
            clear_bit<<<1024, 256>>>((std::uint32_t*)pool, pool_bytes / 4);
            CHECK(cudaDeviceSynchronize());
        }
        setenv("ABLATE", std::to_string(split - 1).c_str(), 1);
        const size_t bytes = prepacked::size(n, k);
        const double us = time_layers(n, k, m, kd == 'h' ? DType::float16 : DType::bfloat16,
                                      coded(un, m, gr, stg, early, bl > 0 ? bl : 1), pdl, size_t(300) << 20, kd == 's',
                                      bytes > (50u << 20) ? 15 : 25, pool, pool_bytes, x, y);
        printf(
            "%6dx%-6d M=%d units=%d groups=%d stages=%d blocks=%d pdl=%d early=%d split=%d %c: %8.2f us %5.1f%% of "
            "4.4\n",
            n, k, m, un, gr, stg, bl, pdl, early, split, kd, us, us > 0 ? bytes / us / 4.4e6 * 100 : 0.0);
        fflush(stdout);
    }
    return 0;
}
