// Memory that runs out at every allocation in turn: std::bad_alloc comes out, nothing else happens, and the same object
// gives the same bits right after. Counted are operator new and posix_memalign, which is all that the core calls.
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "borrowed_weight.h"
#include "check.h"
#include "linear.h"
#include "quantize.h"

namespace {

std::atomic<long> allocations_left{-1};  // until the one that fails; negative: none does
std::atomic<long> refused{0};

bool refuses() {
    if (allocations_left.load(std::memory_order_relaxed) < 0) return false;
    if (allocations_left.fetch_sub(1, std::memory_order_relaxed) != 0) return false;
    ++refused;
    return true;
}

void* allocate(std::size_t bytes, std::size_t alignment) {
    if (refuses()) return nullptr;
    return alignment <= alignof(std::max_align_t)
               ? std::malloc(std::max<std::size_t>(bytes, 1))
               : std::aligned_alloc(alignment,
                                    (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment);
}

void* allocate_or_throw(std::size_t bytes, std::size_t alignment) {
    if (void* memory = allocate(bytes, alignment)) return memory;
    throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate_or_throw(bytes, 1); }
void* operator new[](std::size_t bytes) { return allocate_or_throw(bytes, 1); }
void* operator new(std::size_t bytes, std::align_val_t a) { return allocate_or_throw(bytes, std::size_t(a)); }
void* operator new[](std::size_t bytes, std::align_val_t a) { return allocate_or_throw(bytes, std::size_t(a)); }
void* operator new(std::size_t bytes, const std::nothrow_t& /*tag*/) noexcept { return allocate(bytes, 1); }
void* operator new[](std::size_t bytes, const std::nothrow_t& /*tag*/) noexcept { return allocate(bytes, 1); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*bytes*/) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t /*bytes*/) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t /*alignment*/) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t /*alignment*/) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*bytes*/, std::align_val_t /*alignment*/) noexcept {
    std::free(memory);
}
void operator delete[](void* memory, std::size_t /*bytes*/, std::align_val_t /*a*/) noexcept { std::free(memory); }

extern "C" int posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
    using Function = int (*)(void**, std::size_t, std::size_t);
    static const auto real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "posix_memalign"));
    return refuses() ? ENOMEM : real(memory, alignment, bytes);
}

namespace {

using namespace fp4linear;

// Runs the work with the n-th allocation failing, for every n, each time in a thread of its own, whose scratch is
// empty. Returns how many there are. `after` says whether everything is as before.
long walk(const char* what, const std::function<void()>& work, const std::function<bool()>& after) {
    for (long n = 0; n < 10'000; ++n) {
        bool threw = false, other = false;
        const long before = refused.load();
        std::thread([&] {
            allocations_left = n;
            try {
                work();
            } catch (const std::bad_alloc&) {
                threw = true;
            } catch (...) {
                other = true;
            }
            allocations_left = -1;
        }).join();
        const bool fired = refused.load() != before;
        if (other || (threw && !fired) || !after()) {
            std::cerr << what << ": allocation " << n << (other ? ": another exception\n" : ": not as before\n");
            CHECK(false);
            return n;
        }
        CHECK(true);
        if (!fired) return n;
    }
    CHECK(false);
    return 0;
}

struct Call {
    Problem problem;
    std::vector<std::uint8_t> x, y;

    Call(const Linear& layer, std::int64_t m, DType dtype, bool wide_range) {
        problem.m = m;
        problem.n = layer.out_features();
        problem.k = layer.in_features();
        problem.block_size = layer.block_size();
        problem.dtype = dtype;
        problem.x_row_stride = problem.k;
        x.resize(static_cast<std::size_t>(m * problem.k) * size_of(dtype));
        y.resize(static_cast<std::size_t>(m * problem.n) * size_of(dtype));
        std::mt19937 random(7);
        for (std::size_t i = 0; i < x.size() / size_of(dtype); ++i) {
            if (dtype == DType::float32) {
                // A wide range: rows are staged several times.
                const float v = wide_range && i % 5 == 0 ? 0x1p-120f : 0.5f + static_cast<float>(random() % 64);
                std::memcpy(x.data() + 4 * i, &v, 4);
            } else {
                const auto bits = static_cast<std::uint16_t>(0x3C00 + random() % 512);  // 1 to 1.5, or bf16 near 0.01
                std::memcpy(x.data() + 2 * i, &bits, 2);
            }
        }
        problem.x = x.data();
        problem.y = y.data();
    }
};

struct Weight {
    std::int64_t n, k;
    int block_size;
    std::vector<std::uint8_t> b, scales;

    Weight(std::int64_t n, std::int64_t k, int block_size) : n(n), k(k), block_size(block_size) {
        std::mt19937 random(3);
        b.resize(static_cast<std::size_t>(n * (k / 2)));
        scales.resize(static_cast<std::size_t>(n * blocks_per_row(k, block_size)));
        for (auto& byte : b) byte = static_cast<std::uint8_t>(random());
        for (auto& byte : scales) byte = static_cast<std::uint8_t>(0x20 + random() % 0x38);
    }

    [[nodiscard]] LinearArguments arguments(NanScales nan_scales) const {
        LinearArguments a;
        a.n = n;
        a.k = k;
        a.block_size = block_size;
        a.b = b.data();
        a.scales = scales.data();
        a.scale2.assign(static_cast<std::size_t>(n), 0.5f);
        a.bias.assign(static_cast<std::size_t>(n), 0.25f);
        a.nan_scales = nan_scales;
        return a;
    }
};

void forwards(const Linear& layer, const char* what) {
    for (const DType dtype : {DType::float16, DType::bfloat16, DType::float32}) {
        for (const std::int64_t m : {1, 40}) {
            Call call(layer, m, dtype, true);
            layer.forward(call.problem);
            const std::vector<std::uint8_t> wanted = call.y;
            const long count = walk(
                what, [&] { layer.forward(call.problem); },
                [&] {
                    std::fill(call.y.begin(), call.y.end(), std::uint8_t{0xFF});
                    layer.forward(call.problem);
                    return call.y == wanted;
                });
            CHECK(count > 0);
        }
    }
}

void layers() {
    for (const int block_size : {16, 8}) {  // tiled and canonical
        Weight w(150, 320, block_size);
        w.scales[5] = 0x7F;
        for (const char* path : {"cpu_gemv", "cpu_gemm", "native_emulated"}) {
            if (block_size != 16 && std::string(path) == "native_emulated") continue;
            Options options;
            options.path = path;
            options.num_threads = 3;
            std::optional<Linear> made;
            const long count = walk(
                "construction",
                [&] {
                    made.reset();
                    made.emplace(w.arguments(NanScales::zero), options);
                },
                [&] {
                    made.reset();
                    made.emplace(w.arguments(NanScales::zero), options);
                    std::vector<std::uint8_t> b(w.b.size()), scales(w.scales.size());
                    made->canonical(b.data(), scales.data());
                    return b == w.b && scales == w.scales;
                });
            CHECK(count > 2);
            CHECK(made.has_value());
            if (!made.has_value()) continue;
            forwards(*made, path);

            std::vector<float> wanted(static_cast<std::size_t>(w.n * w.k)), got(wanted.size());
            made->dequantize(wanted.data());
            walk(
                "dequantize", [&] { made->dequantize(got.data()); },
                [&] {
                    made->dequantize(got.data());
                    return got == wanted;
                });
            walk(
                "plan", [&] { (void)describe(made->plan(3, DType::float16), {}); },
                [&] { return made->plan(3, DType::float16).name() == path; });
        }
    }
}

void an_error_that_finds_no_memory() {
    Weight w(4, 64, 16);
    w.scales[0] = 0x7F;
    const auto refused_by_name = [&] {
        try {
            const Linear layer(w.arguments(NanScales::error), {});
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    walk(
        "NaN scales",
        [&] {
            if (!refused_by_name()) throw std::runtime_error("accepted");
        },
        refused_by_name);
}

void borrowed_and_quantized() {
    const Weight w(40, 128, 16);
    std::vector<float> scale2(40, 0.5f);
    const Linear layer(w.arguments(NanScales::error), {});
    Call call(layer, 20, DType::float16, false);
    BorrowedWeight borrowed;
    borrowed.weight = w.b.data();
    borrowed.scales = w.scales.data();
    borrowed.scale2 = scale2.data();
    forward(borrowed, call.problem, {});
    const std::vector<std::uint8_t> wanted = call.y;
    walk(
        "borrowed", [&] { forward(borrowed, call.problem, {}); },
        [&] {
            forward(borrowed, call.problem, {});
            return call.y == wanted;
        });

    std::vector<float> values(40 * 128, 1.5f);
    std::vector<std::uint8_t> b(w.b.size()), scales(w.scales.size());
    walk(
        "quantize", [&] { quantize(40, 128, values.data(), QuantizeMethod::mse, 0.01f, b.data(), scales.data()); },
        [&] { return true; });
}

// A child of fork() starts its threads anew: what it can't have, it does without, and its signals stay as they were.
void threads_that_find_no_memory() {
    const Weight w(600, 2048, 16);
    Options options;
    options.num_threads = 1;
    const Linear alone(w.arguments(NanScales::error), options);
    options.num_threads = 4;
    const Linear layer(w.arguments(NanScales::error), options);
    Call call(layer, 4, DType::float16, false);
    alone.forward(call.problem);
    const std::vector<std::uint8_t> wanted = call.y;
    for (long n = 0; n < 200; ++n) {
        const pid_t child = fork();
        if (child == 0) {
            sigset_t before, after;
            pthread_sigmask(SIG_SETMASK, nullptr, &before);
            allocations_left = n;
            bool right = false;
            try {
                layer.forward(call.problem);
                right = call.y == wanted;
            } catch (const std::bad_alloc&) {
                right = true;
            }
            const bool fired = refused.load() != 0;
            allocations_left = -1;
            pthread_sigmask(SIG_SETMASK, nullptr, &after);
            for (int signal = 1; signal < NSIG; ++signal)
                right = right && sigismember(&before, signal) == sigismember(&after, signal);
            std::fill(call.y.begin(), call.y.end(), std::uint8_t{0xFF});
            layer.forward(call.problem);
            right = right && call.y == wanted;
            _exit(right ? (fired ? 0 : 42) : 1);
        }
        int status = 0;
        waitpid(child, &status, 0);
        CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 42));
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            CHECK(n > 3);
            return;
        }
    }
    CHECK(false);
}

}  // namespace

int main() {
    // Before this process has threads, which a child of fork() under a sanitizer could not start anew.
    refused = 0;
    threads_that_find_no_memory();
    layers();
    an_error_that_finds_no_memory();
    borrowed_and_quantized();
    return check_report();
}
