// Any question to the planner: a plan whose reasons hold together, or std::invalid_argument for a path of that name.
#include "plan.h"

#include <stdexcept>

#include "input.h"

namespace {

using namespace fp4linear;

void examine(const PlanQuery& query, const DeviceSpec& device, const Options& options) {
    const Plan plan = make_plan(query, device, options);
    const bool nothing = query.m == 0 || query.n == 0 || query.k == 0;
    REQUIRE(plan.empty == nothing && (plan.found || !nothing));
    REQUIRE(!describe(plan, query).empty());
    if (plan.empty) return REQUIRE(plan.rejected.empty() && plan.name() == "none");

    const std::size_t at = plan.found ? static_cast<std::size_t>(plan.path) : ladder().size();
    for (std::size_t i = 0; i < plan.rejected.size(); ++i) {
        REQUIRE(i == 0 || plan.rejected[i - 1].path < plan.rejected[i].path);  // in the order of the ladder, once each
        REQUIRE(static_cast<std::size_t>(plan.rejected[i].path) < at && !plan.rejected[i].reason.empty());
    }
    REQUIRE(plan.rejected.size() == at);
    if (plan.found) {
        const Path& path = ladder()[at];
        REQUIRE(path.can_run(query, device, options).empty());
        REQUIRE(options.path == "auto" || path.name == options.path);
        REQUIRE(options.path != "auto" || path.worth_it(query, device, options).empty());
        REQUIRE(plan.rows_per_block == 0 || path.id == PathId::gemv_scalar);
        REQUIRE((device.kind == DeviceKind::cpu) == (path.id == PathId::cpu_gemv || path.id == PathId::cpu_gemm) ||
                path.id == PathId::native_emulated);
        // What the caller forces, the ladder's own choice included, is what runs.
        Options forced = options;
        forced.path = path.name;
        const Plan again = make_plan(query, device, forced);
        REQUIRE(again.found && again.path == plan.path);
    }
    bool threw = false;
    try {
        REQUIRE(choose_path(query, device, options) == plan.path);
    } catch (const std::invalid_argument& error) {
        threw = true;
        REQUIRE(error.what()[0] != '\0');
    }
    REQUIRE(threw == !plan.found);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Input input(data, size);
    PlanQuery query;
    query.m = input.size();
    query.n = input.size();
    query.k = input.size();
    query.block_size = input.one_of({16, 16, 16, 8, 32, 1, 64, INT32_MAX});
    query.dtype = static_cast<DType>(input.from(0, 2));
    query.form = static_cast<WeightForm>(input.from(0, 2));
    DeviceSpec device;
    device.kind = static_cast<DeviceKind>(input.from(0, 1));
    device.sm = input.one_of({0, 60, 70, 75, 80, 86, 89, 90, 100, 103, 110, 120, 121, 130, 999, -1});
    device.sm_count = static_cast<int>(input.one_of({0, 1, 14, 108, 132, 148, INT32_MAX, -1}));
    device.kernels = input.flag() ? 0xFFFFFFFFu : input.word();
    device.cublaslt = input.flag();
    device.cpu_gemv_max_m = input.size();
    Options options;
    options.gemv_max_m = input.flag() ? -1 : input.size();
    options.native_nvfp4 = input.flag();
    options.gemv_tensor_core = input.flag();
    options.gemv_row_tiling = input.flag();
    options.batch_invariant = input.flag();
    options.input_global_scale = input.flag() ? 0.0f : input.number();
    const std::size_t forced = input.byte() % (2 * ladder().size() + 1);
    if (forced == 2 * ladder().size()) {
        const std::vector<std::uint8_t> name = input.bytes(input.byte() % 20u);
        options.path.assign(name.begin(), name.end());
        if (options.path != "auto" && find_path(options.path) == nullptr) {
            bool threw = false;
            try {
                (void)make_plan(query, device, options);
            } catch (const std::invalid_argument&) {
                threw = true;
            }
            REQUIRE(threw);
            return 0;
        }
    } else if (forced < ladder().size()) {
        options.path = ladder()[forced].name;
    }
    examine(query, device, options);
    return 0;
}
