// The ladder as a pure function: every rung's conditions with the reasons in words, for devices that this
// machine need not have.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "plan.h"

namespace {

using namespace fp4linear;

constexpr std::uint32_t every_kernel = (std::uint32_t{1} << path_count) - 1;

DeviceSpec gpu(int sm, int sm_count = 132) {
    DeviceSpec d;
    d.kind = DeviceKind::cuda;
    d.sm = sm;
    d.sm_count = sm_count;
    d.kernels = every_kernel;
    d.cublaslt = true;
    return d;
}

DeviceSpec cpu(std::int64_t gemv_max_m = 16) {
    DeviceSpec d;
    d.cpu_gemv_max_m = gemv_max_m;
    return d;
}

PlanQuery query(std::int64_t m, std::int64_t n = 4096, std::int64_t k = 4096, int block_size = 16,
                DType dtype = DType::bfloat16) {
    return {m, n, k, block_size, dtype};
}

Options forced(const char* path) {
    Options o;
    o.path = path;
    return o;
}

std::string path_of(const PlanQuery& q, const DeviceSpec& d, const Options& o = {}) {
    return std::string(make_plan(q, d, o).name());
}

std::string reason_of(const char* path, const PlanQuery& q, const DeviceSpec& d, const Options& o = {}) {
    for (const Rejection& r : make_plan(q, d, o).rejected)
        if (name_of(r.path) == path) return r.reason;
    return "";
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

std::string error_of(const PlanQuery& q, const DeviceSpec& d, const Options& o) {
    try {
        (void)choose_path(q, d, o);
    } catch (const std::invalid_argument& e) {
        return e.what();
    }
    return "";
}

void test_names() {
    CHECK_EQ(ladder().size(), static_cast<std::size_t>(path_count));
    for (const Path& p : ladder()) {
        CHECK(find_path(p.name) == &p);
        CHECK(name_of(p.id) == p.name);
        CHECK(has(path_names(), std::string(p.name).c_str()));
    }
    CHECK(find_path("auto") == nullptr);
    CHECK(find_path("") == nullptr);
    CHECK(find_path("GEMM_FUSED") == nullptr);
}

void test_empty() {
    for (const DeviceSpec& d : {cpu(), gpu(90), gpu(75)})
        for (const PlanQuery& q : {query(0), query(1, 0), query(1, 8, 0), query(0, 0, 0)}) {
            const Plan plan = make_plan(q, d, {});
            CHECK(plan.found && plan.empty);
            CHECK(plan.name() == "none");
            CHECK(has(describe(plan, q), "nothing to compute"));
        }
}

void test_cpu() {
    CHECK_EQ(path_of(query(1), cpu()), "cpu_gemv");
    CHECK_EQ(path_of(query(16), cpu(16)), "cpu_gemv");
    CHECK_EQ(path_of(query(17), cpu(16)), "cpu_gemm");
    CHECK_EQ(path_of(query(3), cpu(2)), "cpu_gemm");
    CHECK(has(reason_of("cpu_gemv", query(17), cpu(16)), "17"));
    // No shape, block size or type is refused on the host.
    for (const std::int64_t m : {1, 7, 300})
        for (const std::int64_t k : {2, 34, 4096})
            for (const int block : {1, 5, 16, 64})
                for (const DType t : {DType::float16, DType::bfloat16, DType::float32})
                    for (const char* path : {"auto", "cpu_gemv", "cpu_gemm"})
                        CHECK(make_plan(query(m, 3, k, block, t), cpu(), forced(path)).found);
    Options few;
    few.gemv_max_m = 4;
    CHECK_EQ(path_of(query(4), cpu(), few), "cpu_gemv");
    CHECK_EQ(path_of(query(5), cpu(), few), "cpu_gemm");
    few.gemv_max_m = 0;
    CHECK_EQ(path_of(query(1), cpu(), few), "cpu_gemm");
    Options invariant;
    invariant.batch_invariant = true;
    CHECK_EQ(path_of(query(1), cpu(), invariant), path_of(query(5000), cpu(), invariant));
    for (const char* path : {"gemv_tensor_core", "gemv_scalar", "native_nvfp4", "gemm_fused", "dequant_cublas"}) {
        CHECK(has(error_of(query(1), cpu(), forced(path)), "CPU"));
        CHECK(has(error_of(query(1), cpu(), forced(path)), path));
    }
}

void test_gemv_tensor_core() {
    for (const int sm : {80, 86, 89, 90, 100, 103, 120, 121}) {
        CHECK_EQ(path_of(query(1), gpu(sm)), "gemv_tensor_core");
        CHECK_EQ(path_of(query(8), gpu(sm)), "gemv_tensor_core");
    }
    CHECK(has(reason_of("gemv_tensor_core", query(1), gpu(75)), "SM80"));
    CHECK(has(reason_of("gemv_tensor_core", query(1, 64, 4096 + 32), gpu(90)), "K = 4128"));
    CHECK(has(reason_of("gemv_tensor_core", query(1, 64, 4096, 32), gpu(90)), "block_size"));
    CHECK(has(reason_of("gemv_tensor_core", query(9), gpu(90)), "M = 9"));
    Options off;
    off.gemv_tensor_core = false;
    CHECK_EQ(path_of(query(1), gpu(90), off), "gemv_scalar");
    CHECK(has(reason_of("gemv_tensor_core", query(1), gpu(90), off), "FP4LINEAR_GEMV_TENSOR_CORE"));
    DeviceSpec without = gpu(90);
    without.kernels &= ~path_bit(PathId::gemv_tensor_core);
    CHECK(has(reason_of("gemv_tensor_core", query(1), without), "SM90"));
}

void test_gemv_scalar() {
    CHECK_EQ(path_of(query(1), gpu(75)), "gemv_scalar");
    CHECK_EQ(path_of(query(8), gpu(75)), "gemv_scalar");
    CHECK_EQ(path_of(query(1, 4096, 96), gpu(90)), "gemv_scalar");
    CHECK_EQ(path_of(query(9), gpu(75)), "dequant_cublas");
    CHECK(has(reason_of("gemv_scalar", query(9), gpu(75)), "M = 9"));
    CHECK(has(reason_of("gemv_scalar", query(1, 64, 48), gpu(75)), "K = 48"));
    CHECK(has(reason_of("gemv_scalar", query(1, 64, 64, 8), gpu(75)), "block_size"));
    // Rows per block: 1 if M <= 1 or ceil(N/8) < SM count, else 4 if M >= 4, else 2.
    for (const int sm_count : {1, 2, 46, 132, 188}) {
        const std::int64_t enough = std::int64_t{8} * sm_count - 7;  // ceil(N/8) = SM count
        CHECK_EQ(gemv_scalar_rows_per_block(1, enough, sm_count, true), 1);
        CHECK_EQ(gemv_scalar_rows_per_block(0, enough, sm_count, true), 1);
        CHECK_EQ(gemv_scalar_rows_per_block(2, enough, sm_count, true), 2);
        CHECK_EQ(gemv_scalar_rows_per_block(3, enough, sm_count, true), 2);
        CHECK_EQ(gemv_scalar_rows_per_block(4, enough, sm_count, true), 4);
        CHECK_EQ(gemv_scalar_rows_per_block(8, enough, sm_count, true), 4);
        CHECK_EQ(gemv_scalar_rows_per_block(8, enough - 1, sm_count, true), 1);
        CHECK_EQ(gemv_scalar_rows_per_block(8, enough, sm_count, false), 1);
        const Plan plan = make_plan(query(4, enough), gpu(75, sm_count), {});
        CHECK_EQ(plan.rows_per_block, 4);
        CHECK(has(describe(plan, query(4, enough)), "4 rows"));
    }
    Options untiled;
    untiled.gemv_row_tiling = false;
    CHECK_EQ(make_plan(query(8), gpu(75, 8), untiled).rows_per_block, 1);
}

void test_native() {
    Options native;
    native.native_nvfp4 = true;
    for (const int sm : {100, 103, 120, 121}) {
        CHECK_EQ(path_of(query(64), gpu(sm), native), "native_nvfp4");
        CHECK_EQ(path_of(query(9), gpu(sm), native), "native_nvfp4");
        CHECK(path_of(query(64), gpu(sm)) != "native_nvfp4");  // never without being asked
        CHECK(has(reason_of("native_nvfp4", query(64), gpu(sm)), "FP4LINEAR_NATIVE_NVFP4"));
        for (const std::int64_t m : {1, 2, 8})  // small M has priority
            CHECK(path_of(query(m), gpu(sm), native) != "native_nvfp4");
        CHECK_EQ(path_of(query(64), gpu(sm), forced("native_nvfp4")), "native_nvfp4");
        CHECK(has(error_of(query(64, 40), gpu(sm), forced("native_nvfp4")), "N = 40"));
        CHECK(has(error_of(query(64, 64, 48), gpu(sm), forced("native_nvfp4")), "K = 48"));
        CHECK(has(error_of(query(64, 64, 64, 32), gpu(sm), forced("native_nvfp4")), "block_size"));
    }
    for (const int sm : {75, 80, 89, 90, 110}) {
        CHECK(path_of(query(64), gpu(sm), native) != "native_nvfp4");
        CHECK(has(error_of(query(64), gpu(sm), forced("native_nvfp4")), "SM"));
    }
    for (const std::int64_t m : {1, 8, 64, 4096})
        for (const int sm : {75, 90, 120}) {
            CHECK(path_of(query(m), gpu(sm), native) != "native_emulated");
            CHECK_EQ(path_of(query(m), gpu(sm), forced("native_emulated")), "native_emulated");
        }
}

void test_gemms() {
    for (const int sm : {80, 89, 90, 100, 120}) CHECK_EQ(path_of(query(512), gpu(sm)), "gemm_fused");
    CHECK_EQ(path_of(query(512), gpu(75)), "dequant_cublas");
    CHECK(has(reason_of("gemm_fused", query(512), gpu(75)), "SM80"));
    // Dequantising once pays at large M where it is faster, and only where the library is.
    CHECK_EQ(path_of(query(std::int64_t{1} << 40), gpu(90)), "gemm_fused");
    for (const int sm : {80, 89, 100, 120}) {
        CHECK_EQ(path_of(query(1024), gpu(sm)), "gemm_fused");
        CHECK_EQ(path_of(query(1025), gpu(sm)), "dequant_cublas");
        CHECK(has(reason_of("gemm_fused", query(1025), gpu(sm)), "above 1024"));
        CHECK_EQ(path_of(query(1025), gpu(sm), forced("gemm_fused")), "gemm_fused");
        DeviceSpec alone = gpu(sm);
        alone.cublaslt = false;
        CHECK_EQ(path_of(query(1025), alone), "gemm_fused");
    }
    for (const int sm : {80, 90}) {
        PlanQuery canonical = query(64);
        canonical.form = WeightForm::canonical;
        CHECK_EQ(path_of(canonical, gpu(sm)), "dequant_cublas");
        CHECK(has(reason_of("gemm_fused", canonical, gpu(sm)), "canonical"));
    }
    for (const PlanQuery& q : {query(512, 33, 34), query(1, 1, 2), query(64, 64, 64, 1), query(8, 5, 4304)})
        CHECK(make_plan(q, gpu(75), {}).found);
    DeviceSpec no_library = gpu(75);
    no_library.cublaslt = false;
    no_library.cublaslt_reason = "libcublasLt.so.13 was not found";
    const std::string message = error_of(query(512), no_library, {});
    CHECK(has(message, "libcublasLt.so.13 was not found"));
    for (const Path& p : ladder()) CHECK(has(message, std::string(p.name).c_str()));
    CHECK(has(error_of(query(512), no_library, forced("dequant_cublas")), "cuBLASLt"));
    CHECK_EQ(path_of(query(1), no_library), "gemv_scalar");
    for (const DType t : {DType::float16, DType::bfloat16}) CHECK(make_plan(query(9, 8, 64, 16, t), gpu(75), {}).found);
    CHECK(has(error_of(query(1, 64, 128, 16, DType::float32), gpu(90), {}), "float32"));
}

void test_batch_invariant() {
    Options invariant;
    invariant.batch_invariant = true;
    for (const int sm : {80, 90, 120}) {
        invariant.native_nvfp4 = sm == 120;
        const std::string one = path_of(query(1), gpu(sm), invariant);
        for (const std::int64_t m : {2, 8, 9, 64, 4096}) CHECK_EQ(path_of(query(m), gpu(sm), invariant), one);
        CHECK_EQ(one, "gemm_fused");
        // A weight that is not prepacked: 8 rows at a time.
        for (const std::int64_t m : {1, 8, 9, 4096}) {
            CHECK_EQ(path_of(query(m, 64, 96), gpu(sm), invariant), "gemv_scalar");
            CHECK_EQ(path_of(query(m), gpu(75), invariant), "gemv_scalar");
        }
        CHECK(has(error_of(query(9, 64, 48), gpu(sm), invariant), "batch_invariant"));
    }
    Options o = invariant;
    o.path = "dequant_cublas";
    CHECK(has(error_of(query(64), gpu(90), o), "batch_invariant"));
    o.path = "native_nvfp4";
    CHECK(has(error_of(query(64), gpu(120), o), "batch_invariant"));
}

void test_unknown_name() {
    bool thrown = false;
    try {
        (void)make_plan(query(1), cpu(), forced("gemv"));
    } catch (const std::invalid_argument& e) {
        thrown = has(e.what(), "gemv") && has(e.what(), "cpu_gemm") && has(e.what(), "dequant_cublas");
    }
    CHECK(thrown);
    CHECK(has(error_of(query(0), cpu(), forced("fastest")), "fastest"));  // even with nothing to compute
}

// What holds for every question: the rungs above the choice, and only they, are rejected, each with a reason, and the
// call's own choice agrees.
void test_every_question() {
    std::vector<DeviceSpec> devices = {cpu(), cpu(1)};
    for (const int sm : {75, 80, 86, 89, 90, 100, 103, 120, 121})
        for (const int sm_count : {1, 36, 132, 188}) devices.push_back(gpu(sm, sm_count));
    long questions = 0;
    for (const DeviceSpec& d : devices)
        for (const std::int64_t m : {1, 2, 8, 9, 17, 300})
            for (const std::int64_t n : {1, 31, 32, 4096})
                for (const std::int64_t k : {2, 16, 32, 48, 128, 4304})
                    for (const int block : {1, 16, 32})
                        for (const bool native : {false, true})
                            for (const char* path : {"auto", "cpu_gemm", "gemv_tensor_core", "gemv_scalar",
                                                     "native_nvfp4", "gemm_fused", "dequant_cublas"}) {
                                Options o = forced(path);
                                o.native_nvfp4 = native;
                                const PlanQuery q = query(m, n, k, block, DType::float16);
                                const Plan plan = make_plan(q, d, o);
                                ++questions;
                                std::size_t above = 0;
                                bool in_order = true, reasoned = true;
                                for (const Rejection& r : plan.rejected) {
                                    in_order = in_order && ladder()[above++].id == r.path;
                                    reasoned = reasoned && !r.reason.empty();
                                }
                                if (!in_order || !reasoned) CHECK(in_order && reasoned);
                                if (plan.found) {
                                    if (ladder()[above].id != plan.path) CHECK(ladder()[above].id == plan.path);
                                    if (choose_path(q, d, o) != plan.path) CHECK(choose_path(q, d, o) == plan.path);
                                } else {
                                    if (o.path == "auto") CHECK(plan.found);  // every shape runs on every device
                                    const std::string message = error_of(q, d, o);
                                    const std::string reason = reason_of(path, q, d, o);
                                    if (!has(message, reason.c_str()) || reason.empty())
                                        CHECK(has(message, reason.c_str()));
                                }
                            }
    CHECK(questions > 50'000);
}

}  // namespace

int main() {
    test_names();
    test_empty();
    test_cpu();
    test_gemv_tensor_core();
    test_gemv_scalar();
    test_native();
    test_gemms();
    test_batch_invariant();
    test_unknown_name();
    test_every_question();
    return check_report();
}
