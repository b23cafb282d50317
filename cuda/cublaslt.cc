#include "cuda/cublaslt.h"

#include <dlfcn.h>

#include <atomic>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>

namespace fp4linear::cuda::cublaslt {
namespace {

// Values of the public enumerations (cuBLAS 12 and 13 documentation, "cuBLASLt Datatypes Reference").
constexpr int status_success = 0;
constexpr int compute_32f = 68;
constexpr int type_32f = 0, type_16f = 2, type_16bf = 14;
constexpr int desc_transa = 3;
constexpr int operation_t = 1;
constexpr int preference_max_workspace_bytes = 1, preference_reduction_scheme_mask = 3;
constexpr std::uint32_t reduction_in_compute_type = 2;

using Handle = void*;
using Descriptor = void*;
using Layout = void*;
using Preference = void*;

struct Algorithm {
    std::uint64_t data[8];
};
struct HeuristicResult {
    Algorithm algorithm;
    std::size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
};

struct Library {
    int (*create)(Handle*) = nullptr;
    int (*descriptor_create)(Descriptor*, int compute, int scale_type) = nullptr;
    int (*descriptor_destroy)(Descriptor) = nullptr;
    int (*descriptor_set)(Descriptor, int attribute, const void* value, std::size_t bytes) = nullptr;
    int (*layout_create)(Layout*, int type, std::uint64_t rows, std::uint64_t cols, std::int64_t ld) = nullptr;
    int (*layout_destroy)(Layout) = nullptr;
    int (*preference_create)(Preference*) = nullptr;
    int (*preference_destroy)(Preference) = nullptr;
    int (*preference_set)(Preference, int attribute, const void* value, std::size_t bytes) = nullptr;
    int (*heuristic)(Handle, Descriptor, Layout, Layout, Layout, Layout, Preference, int, HeuristicResult*,
                     int*) = nullptr;
    int (*matmul)(Handle, Descriptor, const void* alpha, const void* a, Layout, const void* b, Layout, const void* beta,
                  const void* c, Layout, void* d, Layout, const Algorithm*, void* workspace, std::size_t,
                  cudaStream_t) = nullptr;
    std::string problem;
};

template <class Function>
bool load(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
}

bool load_all(void* library, Library& l) {
    return load(library, "cublasLtCreate", l.create) &&
           load(library, "cublasLtMatmulDescCreate", l.descriptor_create) &&
           load(library, "cublasLtMatmulDescDestroy", l.descriptor_destroy) &&
           load(library, "cublasLtMatmulDescSetAttribute", l.descriptor_set) &&
           load(library, "cublasLtMatrixLayoutCreate", l.layout_create) &&
           load(library, "cublasLtMatrixLayoutDestroy", l.layout_destroy) &&
           load(library, "cublasLtMatmulPreferenceCreate", l.preference_create) &&
           load(library, "cublasLtMatmulPreferenceDestroy", l.preference_destroy) &&
           load(library, "cublasLtMatmulPreferenceSetAttribute", l.preference_set) &&
           load(library, "cublasLtMatmulAlgoGetHeuristic", l.heuristic) && load(library, "cublasLtMatmul", l.matmul);
}

Library open_library() {
    Library l;
    // By soname: a copy that the process has loaded answers, wherever it lies.
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
        void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (handle != nullptr && load_all(handle, l)) {
            l.problem.clear();
            return l;
        }
        l.problem += (l.problem.empty() ? "can't load " : ", ") + std::string(name);
    }
    l.problem += "; pip install 'fp4linear[cu13]' brings it";
    return l;
}

struct Opened {
    std::mutex mutex;
    Library library;
    std::atomic<bool> loaded{false};
};
Opened& opened() {
    static auto* instance = new Opened;
    return *instance;
}

const Library& library() { return opened().library; }

void check(int status, const char* call) {
    if (status != status_success)
        throw std::runtime_error(std::string(call) + " failed: cublasStatus " + std::to_string(status));
}

int type_of(DType t) { return t == DType::float16 ? type_16f : t == DType::bfloat16 ? type_16bf : type_32f; }

// Guards the handles and the prepared calls.
std::mutex& calls_mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
}

Handle handle_of_device() {
    static auto* handles = new std::map<int, Handle>;
    int device = 0;
    cudaGetDevice(&device);
    Handle& handle = (*handles)[device];
    if (handle == nullptr) check(library().create(&handle), "cublasLtCreate");
    return handle;
}

// Column-major as cuBLAS sees it: D^T [n, m] = W^T(transposed) * x^T, so A is w and B is x.
struct Prepared {
    Handle handle = nullptr;
    Descriptor descriptor = nullptr;
    Layout a = nullptr, b = nullptr, d = nullptr;
    HeuristicResult chosen{};
};

using Key = std::tuple<int, std::int64_t, std::int64_t, std::int64_t, int, int, std::int64_t, std::int64_t,
                       std::int64_t, std::uintptr_t>;

Prepared prepare(const Matmul& m, std::size_t workspace_bytes) {
    const Library& l = library();
    Prepared p;
    p.handle = handle_of_device();
    check(l.descriptor_create(&p.descriptor, compute_32f, type_32f), "cublasLtMatmulDescCreate");
    check(l.descriptor_set(p.descriptor, desc_transa, &operation_t, sizeof operation_t),
          "cublasLtMatmulDescSetAttribute");
    const auto u = [](std::int64_t v) { return static_cast<std::uint64_t>(v); };
    check(l.layout_create(&p.a, type_of(m.in), u(m.k), u(m.n), m.ldw), "cublasLtMatrixLayoutCreate");
    check(l.layout_create(&p.b, type_of(m.in), u(m.k), u(m.m), m.ldx), "cublasLtMatrixLayoutCreate");
    check(l.layout_create(&p.d, type_of(m.out), u(m.n), u(m.m), m.ldd), "cublasLtMatrixLayoutCreate");
    Preference preference = nullptr;
    check(l.preference_create(&preference), "cublasLtMatmulPreferenceCreate");
    check(l.preference_set(preference, preference_max_workspace_bytes, &workspace_bytes, sizeof workspace_bytes),
          "cublasLtMatmulPreferenceSetAttribute");
    // Split-K may add its parts only in fp32 and in scratch: in the output's type it would round (and, in fp16,
    // overflow) once a part, and in place it would add in any order.
    check(l.preference_set(preference, preference_reduction_scheme_mask, &reduction_in_compute_type,
                           sizeof reduction_in_compute_type),
          "cublasLtMatmulPreferenceSetAttribute");
    // What the alignment of these pointers allows: the library assumes 256 bytes unless it is told.
    struct {
        int attribute;
        const void* pointer;
    } const aligned[] = {{5, m.w}, {6, m.x}, {7, m.d}, {8, m.d}};  // MIN_ALIGNMENT_{A,B,C,D}_BYTES
    for (const auto& each : aligned) {
        const auto address = reinterpret_cast<std::uintptr_t>(each.pointer);
        std::uint32_t bytes = 256;
        while (address % bytes != 0) bytes /= 2;
        check(l.preference_set(preference, each.attribute, &bytes, sizeof bytes),
              "cublasLtMatmulPreferenceSetAttribute");
    }
    int count = 0;
    const int status = l.heuristic(p.handle, p.descriptor, p.a, p.b, p.d, p.d, preference, 1, &p.chosen, &count);
    l.preference_destroy(preference);
    if (status != status_success || count == 0)
        throw std::runtime_error("cublasLtMatmulAlgoGetHeuristic found no kernel for M = " + std::to_string(m.m) +
                                 ", N = " + std::to_string(m.n) + ", K = " + std::to_string(m.k) + " (cublasStatus " +
                                 std::to_string(status) + ")");
    return p;
}

std::uintptr_t alignment_key(const Matmul& m) {
    const auto low = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) & 0xFF; };
    return low(m.w) | low(m.x) << 8 | low(m.d) << 16;
}

}  // namespace

bool available() {
    Opened& o = opened();
    if (o.loaded.load(std::memory_order_acquire)) return true;
    const std::lock_guard lock(o.mutex);
    if (o.loaded.load(std::memory_order_relaxed)) return true;
    o.library = open_library();
    const bool loaded = o.library.problem.empty();
    o.loaded.store(loaded, std::memory_order_release);
    return loaded;
}

std::string unavailable_reason() {
    const std::lock_guard lock(opened().mutex);
    return opened().library.problem;
}

void prepare_device() {
    const std::lock_guard lock(calls_mutex());
    handle_of_device();
}

void matmul(const Matmul& m) {
    static auto* prepared = new std::map<Key, Prepared>;
    const Library& l = library();
    int device = 0;
    cudaGetDevice(&device);
    const Key key{device,          m.m, m.n, m.k, static_cast<int>(m.in), static_cast<int>(m.out), m.ldx, m.ldw, m.ldd,
                  alignment_key(m)};
    // Held until the call is enqueued: another thread may drop the prepared calls.
    const std::lock_guard lock(calls_mutex());
    auto found = prepared->find(key);
    if (found == prepared->end()) {
        if (prepared->size() >= 1024) {  // shapes of a long-running server with ragged batches
            for (auto& [_, old] : *prepared) {
                l.descriptor_destroy(old.descriptor);
                for (Layout layout : {old.a, old.b, old.d}) l.layout_destroy(layout);
            }
            prepared->clear();
        }
        found = prepared->emplace(key, prepare(m, m.workspace_bytes)).first;
    }
    const Prepared& p = found->second;
    const float beta = 0.0f;
    check(l.matmul(p.handle, p.descriptor, &m.alpha, m.w, p.a, m.x, p.b, &beta, m.d, p.d, m.d, p.d, &p.chosen.algorithm,
                   m.workspace, p.chosen.workspace_bytes, m.stream),
          "cublasLtMatmul");
}

}  // namespace fp4linear::cuda::cublaslt
