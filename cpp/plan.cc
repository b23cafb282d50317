#include "plan.h"

#include <array>
#include <iterator>
#include <limits>
#include <stdexcept>

namespace fp4linear {
namespace {

// Limits of the GPU paths. Each is a property of the kernel, not a crossover.
constexpr std::int64_t gemv_scalar_max_m = 8;       // rows of x that a warp's registers hold
constexpr std::int64_t gemv_tensor_core_max_m = 8;  // rows of x in one pass over the weight: the n of mma.m16n8k16
constexpr std::int64_t prepacked_k = 64;            // of a unit of the prepacked weight (cuda/prepacked.h)
constexpr std::int64_t gemv_scalar_k = 32;          // a lane's share of K, 16 bytes of codes
constexpr std::int64_t native_multiple = 32;        // of N and K, from the 16-byte alignment of TMA boxes
constexpr int gemv_scalar_columns_per_block = 8;    // warps a block, a column each

// Where the ladder leaves a path that could still run, per architecture: the first row whose `sm` is not above the
// device's. docs/performance.md has the measurements behind the rows that are measured.
struct Crossovers {
    int sm;
    std::int64_t fused_max_m;  // above it, dequantising once and cuBLAS are faster than gemm_fused
    const char* source;
};
constexpr std::int64_t unlimited = std::numeric_limits<std::int64_t>::max();
constexpr Crossovers crossovers[] = {
    {100, 1024, "estimated, no such GPU was measured"},
    {90, unlimited, "measured on an H200"},
    {80, 1024, "estimated, no such GPU was measured"},
};
const Crossovers& crossovers_of(int sm) {
    for (const Crossovers& c : crossovers)
        if (c.sm <= sm) return c;
    return crossovers[std::size(crossovers) - 1];
}

std::string number(std::int64_t v) { return std::to_string(v); }

std::string needs_cpu(const DeviceSpec& d) { return d.kind == DeviceKind::cpu ? "" : "the weight is on a GPU"; }

std::string needs_cuda(const DeviceSpec& d, PathId id) {
    if (d.kind != DeviceKind::cuda) return "the weight is on the CPU";
    if ((d.kernels & path_bit(id)) == 0) return "this build has no kernel of this path for SM" + number(d.sm);
    return "";
}

std::string needs_block_16(const PlanQuery& q) {
    return q.block_size == 16 ? "" : "needs block_size 16, got " + number(q.block_size);
}

std::string needs_multiple(const char* what, std::int64_t value, std::int64_t multiple) {
    if (value % multiple == 0) return "";
    return std::string(what) + " = " + number(value) + " is not a multiple of " + number(multiple);
}

std::string needs_m_at_most(const PlanQuery& q, std::int64_t most) {
    return q.m <= most ? "" : "M = " + number(q.m) + " is above " + number(most);
}

std::string needs_sm(const DeviceSpec& d, int least) {
    return d.sm >= least ? "" : "needs SM" + number(least) + " or newer, got SM" + number(d.sm);
}

std::string needs_form(const PlanQuery& q, WeightForm form) {
    if (q.form == WeightForm::any || q.form == form) return "";
    return form == WeightForm::prepacked ? "the layer holds its weight in canonical form (NaN scales, or K or an "
                                           "option rules the prepacked one out)"
                                         : "the layer holds its weight prepacked";
}

std::string needs_16_bit_x(const PlanQuery& q) {
    return q.dtype != DType::float32 ? "" : "x is float32; a GPU takes float16 and bfloat16";
}

template <class... Conditions>
std::string first_unmet(Conditions... conditions) {
    std::string unmet;
    // Each condition is called only while all before it hold, so that the first cause is the one reported.
    (void)((unmet.empty() ? (unmet = conditions(), true) : true) && ...);
    return unmet;
}

std::string always(const PlanQuery&, const DeviceSpec&, const Options&) { return ""; }

std::string cpu_gemv_can_run(const PlanQuery&, const DeviceSpec& d, const Options&) { return needs_cpu(d); }
std::string cpu_gemv_worth_it(const PlanQuery& q, const DeviceSpec& d, const Options& o) {
    if (o.batch_invariant) return "";
    return needs_m_at_most(q, o.gemv_max_m >= 0 ? o.gemv_max_m : d.cpu_gemv_max_m);
}

std::string cpu_gemm_can_run(const PlanQuery&, const DeviceSpec& d, const Options& o) {
    return first_unmet([&] { return needs_cpu(d); },
                       [&] { return std::string(o.batch_invariant ? "batch_invariant is set" : ""); });
}

std::string gemv_tensor_core_can_run(const PlanQuery& q, const DeviceSpec& d, const Options& o) {
    return first_unmet([&] { return needs_cuda(d, PathId::gemv_tensor_core); }, [&] { return needs_sm(d, 80); },
                       [&] { return std::string(o.gemv_tensor_core ? "" : "FP4LINEAR_GEMV_TENSOR_CORE=0"); },
                       [&] { return needs_16_bit_x(q); }, [&] { return needs_m_at_most(q, gemv_tensor_core_max_m); },
                       [&] { return needs_block_16(q); }, [&] { return needs_multiple("K", q.k, prepacked_k); },
                       [&] { return needs_form(q, WeightForm::prepacked); });
}

// Batch-invariant it takes any M, 8 rows at a time: a row's sums do not depend on the rows beside it.
std::string gemv_scalar_can_run(const PlanQuery& q, const DeviceSpec& d, const Options& o) {
    return first_unmet([&] { return needs_cuda(d, PathId::gemv_scalar); }, [&] { return needs_sm(d, 75); },
                       [&] { return needs_16_bit_x(q); },
                       [&] { return needs_m_at_most(q, o.batch_invariant ? unlimited : gemv_scalar_max_m); },
                       [&] { return needs_block_16(q); }, [&] { return needs_multiple("K", q.k, gemv_scalar_k); },
                       [&] { return needs_form(q, WeightForm::canonical); });
}

std::string native_nvfp4_can_run(const PlanQuery& q, const DeviceSpec& d, const Options& o) {
    return first_unmet(
        [&] {
            if (d.kind != DeviceKind::cuda) return needs_cuda(d, PathId::native_nvfp4);
            const bool blackwell = d.sm / 10 == 12 || d.sm / 10 == 10;
            return blackwell ? std::string() : "needs SM10x or SM12x, got SM" + number(d.sm);
        },
        [&] {
            std::string unmet = needs_cuda(d, PathId::native_nvfp4);
            if (!unmet.empty() && !d.native_reason.empty()) unmet += ": " + d.native_reason;
            return unmet;
        },
        [&] { return needs_16_bit_x(q); }, [&] { return needs_block_16(q); },
        [&] { return needs_multiple("K", q.k, native_multiple); },
        [&] { return needs_multiple("N", q.n, native_multiple); },
        [&] { return std::string(o.batch_invariant ? "batch_invariant is set and its tile depends on M" : ""); });
}
std::string native_nvfp4_worth_it(const PlanQuery& q, const DeviceSpec&, const Options& o) {
    if (!o.native_nvfp4) return "opt-in: it rounds x to 4 bits (native=True, FP4LINEAR_NATIVE_NVFP4=1)";
    return q.m > gemv_scalar_max_m ? "" : "M = " + number(q.m) + " is bound by memory: a GEMV needs no rounding of x";
}

std::string gemm_fused_can_run(const PlanQuery& q, const DeviceSpec& d, const Options&) {
    return first_unmet([&] { return needs_cuda(d, PathId::gemm_fused); }, [&] { return needs_sm(d, 80); },
                       [&] { return needs_16_bit_x(q); }, [&] { return needs_block_16(q); },
                       [&] { return needs_multiple("K", q.k, prepacked_k); },
                       [&] { return needs_form(q, WeightForm::prepacked); });
}

std::string gemm_fused_worth_it(const PlanQuery& q, const DeviceSpec& d, const Options& o) {
    const Crossovers& c = crossovers_of(d.sm);
    if (o.batch_invariant || !d.cublaslt || q.m <= c.fused_max_m) return "";
    return "M = " + number(q.m) + " is above " + number(c.fused_max_m) + ", from where dequant_cublas is faster (" +
           c.source + ")";
}

std::string gemv_tensor_core_worth_it(const PlanQuery& q, const DeviceSpec&, const Options& o) {
    if (o.batch_invariant) return "batch_invariant is set and the order of its sums depends on M";
    return o.gemv_max_m >= 0 ? needs_m_at_most(q, o.gemv_max_m) : "";
}

std::string gemv_scalar_worth_it(const PlanQuery& q, const DeviceSpec& d, const Options& o) {
    if (o.batch_invariant)
        return gemm_fused_can_run(q, d, o).empty() ? "batch_invariant is set and gemm_fused takes any M faster" : "";
    return o.gemv_max_m >= 0 ? needs_m_at_most(q, o.gemv_max_m) : "";
}

std::string native_emulated_can_run(const PlanQuery& q, const DeviceSpec& d, const Options& o) {
    return first_unmet(
        [&] {
            const bool held = (d.kernels & path_bit(PathId::native_emulated)) != 0;
            return std::string(held ? "" : "this build has no kernel of this path");
        },
        [&] { return d.kind == DeviceKind::cpu ? std::string() : needs_16_bit_x(q); },
        [&] { return needs_block_16(q); },
        [&] {
            const bool depends = o.batch_invariant && o.input_global_scale == 0.0f;
            return std::string(depends ? "batch_invariant is set and the global scale of x is that of the whole call"
                                       : "");
        });
}
std::string native_emulated_worth_it(const PlanQuery&, const DeviceSpec&, const Options&) {
    return "runs only where path='native_emulated' asks for it";
}

std::string dequant_cublas_can_run(const PlanQuery& q, const DeviceSpec& d, const Options& o) {
    return first_unmet(
        [&] { return needs_cuda(d, PathId::dequant_cublas); }, [&] { return needs_16_bit_x(q); },
        [&] { return d.cublaslt ? std::string() : "cuBLASLt is not available: " + d.cublaslt_reason; },
        [&] {
            return std::string(o.batch_invariant ? "batch_invariant is set and cuBLAS picks its kernel by M" : "");
        });
}

constexpr std::array<Path, path_count> paths{{
    {PathId::cpu_gemv, "cpu_gemv", cpu_gemv_can_run, cpu_gemv_worth_it},
    {PathId::cpu_gemm, "cpu_gemm", cpu_gemm_can_run, always},
    {PathId::gemv_tensor_core, "gemv_tensor_core", gemv_tensor_core_can_run, gemv_tensor_core_worth_it},
    {PathId::gemv_scalar, "gemv_scalar", gemv_scalar_can_run, gemv_scalar_worth_it},
    {PathId::native_nvfp4, "native_nvfp4", native_nvfp4_can_run, native_nvfp4_worth_it},
    {PathId::native_emulated, "native_emulated", native_emulated_can_run, native_emulated_worth_it},
    {PathId::gemm_fused, "gemm_fused", gemm_fused_can_run, gemm_fused_worth_it},
    {PathId::dequant_cublas, "dequant_cublas", dequant_cublas_can_run, always},
}};

const Path& forced_path(const std::string& name) {
    const Path* path = find_path(name);
    if (path == nullptr) throw std::invalid_argument("path='" + name + "': expected auto, " + path_names());
    return *path;
}

bool nothing_to_compute(const PlanQuery& q) { return q.m == 0 || q.n == 0 || q.k == 0; }

}  // namespace

std::span<const Path> ladder() { return paths; }

const Path* find_path(std::string_view name) {
    for (const Path& p : paths)
        if (p.name == name) return &p;
    return nullptr;
}

std::string_view name_of(PathId id) { return paths[static_cast<std::size_t>(id)].name; }

std::string path_names() {
    std::string names;
    for (const Path& p : paths) names += (names.empty() ? "" : ", ") + std::string(p.name);
    return names;
}

int gemv_scalar_rows_per_block(std::int64_t m, std::int64_t n, int sm_count, bool row_tiling) {
    const std::int64_t blocks = n / gemv_scalar_columns_per_block + (n % gemv_scalar_columns_per_block != 0 ? 1 : 0);
    if (!row_tiling || m <= 1 || blocks < sm_count) return 1;
    return m >= 4 ? 4 : 2;
}

Plan make_plan(const PlanQuery& q, const DeviceSpec& device, const Options& options) {
    Plan plan;
    const Path* forced = options.path == "auto" ? nullptr : &forced_path(options.path);
    if (nothing_to_compute(q)) {
        plan.found = plan.empty = true;
        return plan;
    }
    for (const Path& p : paths) {
        if (forced != nullptr && p.id != forced->id) {
            plan.rejected.push_back({p.id, "path='" + options.path + "' is forced"});
            continue;
        }
        std::string unmet = p.can_run(q, device, options);
        if (unmet.empty() && forced == nullptr) unmet = p.worth_it(q, device, options);
        if (unmet.empty()) {
            plan.found = true;
            plan.path = p.id;
            if (p.id == PathId::gemv_scalar)
                plan.rows_per_block = gemv_scalar_rows_per_block(q.m, q.n, device.sm_count, options.gemv_row_tiling);
            return plan;
        }
        plan.rejected.push_back({p.id, std::move(unmet)});
    }
    return plan;
}

PathId choose_path(const PlanQuery& q, const DeviceSpec& device, const Options& options) {
    const Plan plan = make_plan(q, device, options);
    if (plan.found) return plan.path;
    std::string message;
    if (options.path != "auto") {
        message = "path='" + options.path + "' can't run: ";
        for (const Rejection& r : plan.rejected)
            if (name_of(r.path) == options.path) message += r.reason;
    } else {
        message = "no path can run M = " + number(q.m) + ", N = " + number(q.n) + ", K = " + number(q.k) + ":";
        for (const Rejection& r : plan.rejected) message += "\n  " + std::string(name_of(r.path)) + ": " + r.reason;
    }
    throw std::invalid_argument(message);
}

std::string describe(const Plan& plan, const PlanQuery& q) {
    std::string text =
        "M = " + number(q.m) + ", N = " + number(q.n) + ", K = " + number(q.k) + ", " + name_of(q.dtype) + ": ";
    if (plan.empty) return text + "nothing to compute";
    text += plan.found ? std::string(plan.name()) : std::string("no path can run");
    if (plan.rows_per_block > 1) text += " (" + number(plan.rows_per_block) + " rows share a weight load)";
    for (const Rejection& r : plan.rejected) text += "\n  not " + std::string(name_of(r.path)) + ": " + r.reason;
    return text;
}

}  // namespace fp4linear
