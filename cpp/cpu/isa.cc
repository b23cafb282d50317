// The list of instruction sets and the choice between them.
#include <array>

#include "cpu/staging.h"
#include "cpu/weight.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fp4linear::cpu {

const char* last_kernels_name = "";

namespace {

template <const KernelTable& table>
void gemv(const WeightView& weight, const Problem& problem, const Epilogue& epilogue, int threads) {
    run_gemv(table, weight, problem, epilogue, threads);
}
template <const KernelTable& table>
void gemm(const WeightView& weight, const Problem& problem, const Epilogue& epilogue, int threads) {
    run_gemm(table, weight, problem, epilogue, threads);
}

bool always() { return true; }

#if defined(__x86_64__)

struct Features {
    bool avx2 = false;    // with FMA and F16C
    bool avx512 = false;  // F, BW, VL and DQ
    bool avx512_bf16 = false;
};

// Intel SDM volume 1, section 14.3 and 15.2: the bit of the instruction set counts only where the system saves its
// registers (OSXSAVE and XCR0).
Features detect() {
    Features features;
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return features;
    constexpr unsigned osxsave = 1u << 27;
    constexpr unsigned avx = 1u << 28;
    constexpr unsigned fma = 1u << 12;
    constexpr unsigned f16c = 1u << 29;
    constexpr unsigned needed = osxsave | avx | fma | f16c;
    if ((ecx & needed) != needed) return features;
    unsigned xcr0 = 0;
    unsigned xcr0_high = 0;
    asm volatile("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0));
    constexpr unsigned ymm_state = 0x06;
    constexpr unsigned zmm_state = 0xE6;
    if ((xcr0 & ymm_state) != ymm_state) return features;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return features;
    constexpr unsigned avx2 = 1u << 5;
    constexpr unsigned avx512f = 1u << 16;
    constexpr unsigned avx512dq = 1u << 17;
    constexpr unsigned avx512bw = 1u << 30;
    constexpr unsigned avx512vl = 1u << 31;
    constexpr unsigned avx512 = avx512f | avx512dq | avx512bw | avx512vl;
    features.avx2 = (ebx & avx2) != 0;
    features.avx512 = features.avx2 && (ebx & avx512) == avx512 && (xcr0 & zmm_state) == zmm_state;
    if (features.avx512 && eax >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) {
        features.avx512_bf16 = (eax & (1u << 5)) != 0;
    }
    return features;
}

const Features& host() {
    static const Features features = detect();
    return features;
}

constexpr std::array isas = {
    Isa{"avx512_bf16", [] { return host().avx512_bf16; }, gemv<avx512_bf16_kernels>, gemm<avx512_bf16_kernels>},
    Isa{"avx512", [] { return host().avx512; }, gemv<avx512_kernels>, gemm<avx512_kernels>},
    Isa{"avx2", [] { return host().avx2; }, gemv<avx2_kernels>, gemm<avx2_kernels>},
    Isa{"portable", always, gemv<portable_kernels>, gemm<portable_kernels>},
};

#else

constexpr std::array isas = {Isa{"portable", always, gemv<portable_kernels>, gemm<portable_kernels>}};

#endif

}  // namespace

std::span<const Isa> all_isas() { return isas; }

const Isa& best_isa() {
    for (const Isa& isa : isas) {
        if (isa.runs_here()) return isa;
    }
    return isas.back();
}

const Isa* find_isa(std::string_view name) {
    for (const Isa& isa : isas) {
        if (isa.name == name) return &isa;
    }
    return nullptr;
}

// Where the two cross, in GFLOP/s of one Zen 4 core, 1024 x 4096 (gemv against gemm): avx512_bf16 with bf16 x 188
// against 167 at M = 32 and 184 against 181 at 64, avx512 with fp32 x 101 against 91 and 97 against 96; avx2 61 against
// 53 at M = 4 and 60 against 63 at 8; portable 4.6 against 6.5 at M = 1. The type of x hardly moves it.
std::int64_t gemv_max_m(const Isa& isa, DType /*dtype*/) {
    if (isa.name == "portable") return 1;
    if (isa.name == "avx2") return 6;
    return 48;
}

std::string_view last_isa_run() { return __atomic_load_n(&last_kernels_name, __ATOMIC_RELAXED); }

}  // namespace fp4linear::cpu
