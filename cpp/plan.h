// Which path runs a call, and why the ones above it on the ladder do not. A pure function: it can be asked about any
// device, present or not.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dtype.h"
#include "options.h"

namespace fp4linear {

// In the order of the ladder (docs/design: cheapest first).
enum class PathId : std::uint8_t {
    cpu_gemv,
    cpu_gemm,
    gemv_tensor_core,
    gemv_scalar,
    native_nvfp4,
    native_emulated,
    gemm_fused,
    dequant_cublas,
};
inline constexpr int path_count = 8;

enum class DeviceKind : std::uint8_t { cpu, cuda };

constexpr std::uint32_t path_bit(PathId id) { return std::uint32_t{1} << static_cast<int>(id); }

// How a layer on a GPU holds its weight; one form, never both.
enum class WeightForm : std::uint8_t {
    any,        // the question is about a layer that does not exist: every form is at hand
    canonical,  // b and scales as they came
    prepacked,  // cuda/prepacked.h
};

struct DeviceSpec {
    DeviceKind kind = DeviceKind::cpu;
    int index = 0;
    int sm = 0;  // compute capability, 90 for 9.0; 0 on the CPU
    int sm_count = 0;
    std::uint32_t kernels = 0;         // path_bit of every path that this build has a kernel of for the device
    bool cublaslt = false;             // the library was found
    std::string cublaslt_reason;       // where it was not: why
    std::string native_reason;         // why the kernels of native_nvfp4 are missing, where that is known
    std::int64_t cpu_gemv_max_m = 16;  // crossover of the CPU paths (cpu::gemv_max_m)
};

struct PlanQuery {
    std::int64_t m = 0, n = 0, k = 0;
    int block_size = 16;
    DType dtype = DType::bfloat16;
    WeightForm form = WeightForm::any;
};

// A rung. `can_run` states what the path needs; `worth_it` states when the ladder takes it though it could run. Both
// give the unmet condition in words, or "" where there is none; with `explain` false any non-empty text will do.
struct Path {
    PathId id;
    std::string_view name;
    std::string (*can_run)(const PlanQuery&, const DeviceSpec&, const Options&);
    std::string (*worth_it)(const PlanQuery&, const DeviceSpec&, const Options&);
};
std::span<const Path> ladder();
const Path* find_path(std::string_view name);  // null for an unknown name
std::string_view name_of(PathId id);
std::string path_names();  // "cpu_gemv, cpu_gemm, ..." for messages

struct Rejection {
    PathId path;
    std::string reason;
};

struct Plan {
    bool found = false;
    bool empty = false;  // nothing to compute (M, N or K is 0): no path runs
    PathId path = PathId::cpu_gemv;
    std::vector<Rejection> rejected;  // the rungs above the chosen one; all of them where none was found
    int rows_per_block = 0;           // gemv_scalar: rows of x that share a weight load

    [[nodiscard]] std::string_view name() const { return empty ? "none" : found ? name_of(path) : ""; }
};

// Never throws for a shape; std::invalid_argument for an unknown name in options.path.
Plan make_plan(const PlanQuery& query, const DeviceSpec& device, const Options& options);

// The same choice without the reasons, for the call itself. Throws std::invalid_argument with all the reasons where no
// path can run.
PathId choose_path(const PlanQuery& query, const DeviceSpec& device, const Options& options);

// One readable sentence a rung.
std::string describe(const Plan& plan, const PlanQuery& query);

// spec: rows per block = 1 if M <= 1 or ceil(N/8) < SM count, else 4 if M >= 4, else 2.
int gemv_scalar_rows_per_block(std::int64_t m, std::int64_t n, int sm_count, bool row_tiling);

}  // namespace fp4linear
