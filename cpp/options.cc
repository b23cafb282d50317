#include "options.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "cpu/cpu.h"
#include "plan.h"

namespace fp4linear {
namespace {

[[noreturn]] void refuse(const char* name, const char* value, const char* takes) {
    throw std::invalid_argument(std::string(name) + "='" + value + "': expected " + takes);
}

constexpr const char* takes_bool = "0, 1, true or false";

bool read_bool(const char* name, bool fallback) {
    const char* value = std::getenv(name);
    if (value == nullptr) return fallback;
    if (std::strcmp(value, "1") == 0 || std::strcmp(value, "true") == 0) return true;
    if (std::strcmp(value, "0") == 0 || std::strcmp(value, "false") == 0) return false;
    refuse(name, value, takes_bool);
}

std::int64_t read_integer(const char* name, std::int64_t least, std::int64_t most, const char* takes,
                          std::int64_t fallback) {
    const char* value = std::getenv(name);
    if (value == nullptr) return fallback;
    std::int64_t number = 0;
    const char* end = value + std::strlen(value);
    const auto [stop, error] = std::from_chars(value, end, number);
    if (error != std::errc() || stop != end || number < least || number > most) refuse(name, value, takes);
    return number;
}

std::string read_string(const char* name, const char* fallback) {
    const char* value = std::getenv(name);
    return value == nullptr ? fallback : value;
}

std::string read_path() {
    std::string value = read_string("FP4LINEAR_PATH", "auto");
    if (value != "auto" && find_path(value) == nullptr)
        refuse("FP4LINEAR_PATH", value.c_str(), ("auto, " + path_names()).c_str());
    return value;
}

std::string read_isa() {
    std::string value = read_string("FP4LINEAR_CPU_ISA", "best");
    if (value == "best") return "";
    if (cpu::find_isa(value) == nullptr) {
        std::string names = "best";
        for (const cpu::Isa& isa : cpu::all_isas()) names += ", " + std::string(isa.name);
        refuse("FP4LINEAR_CPU_ISA", value.c_str(), names.c_str());
    }
    return value;
}

constexpr const char* takes_threads = "a whole number from 1 to 4096";
constexpr const char* takes_max_m = "a whole number >= 0";

}  // namespace

Options options_from_environment() {
    Options o;
    o.path = read_path();
    o.cpu_isa = read_isa();
    o.num_threads = static_cast<int>(read_integer("FP4LINEAR_NUM_THREADS", 1, 4096, takes_threads, 0));
    o.native_nvfp4 = read_bool("FP4LINEAR_NATIVE_NVFP4", o.native_nvfp4);
    o.gemv_tensor_core = read_bool("FP4LINEAR_GEMV_TENSOR_CORE", o.gemv_tensor_core);
    o.gemv_row_tiling = read_bool("FP4LINEAR_GEMV_ROW_TILING", o.gemv_row_tiling);
    o.gemv_max_m =
        read_integer("FP4LINEAR_GEMV_MAX_M", 0, std::numeric_limits<std::int64_t>::max(), takes_max_m, o.gemv_max_m);
    o.log = read_bool("FP4LINEAR_LOG", o.log);
    return o;
}

std::vector<Switch> environment_table() {
    const Options o = options_from_environment();
    const auto yes_no = [](bool b) { return std::string(b ? "1" : "0"); };
    return {
        {"FP4LINEAR_PATH", o.path, "auto or the name of a path", "the path that every call takes"},
        {"FP4LINEAR_CPU_ISA", o.cpu_isa.empty() ? "best" : o.cpu_isa, "best or the name of an instruction set",
         "the CPU kernels to use"},
        {"FP4LINEAR_NUM_THREADS", o.num_threads == 0 ? "all cores" : std::to_string(o.num_threads), takes_threads,
         "threads of a CPU call"},
        {"FP4LINEAR_NATIVE_NVFP4", yes_no(o.native_nvfp4), takes_bool,
         "let Blackwell quantise x to NVFP4 for M > 8 (another result: x is rounded to 4 bits)"},
        {"FP4LINEAR_GEMV_TENSOR_CORE", yes_no(o.gemv_tensor_core), takes_bool, "allow the path gemv_tensor_core"},
        {"FP4LINEAR_GEMV_ROW_TILING", yes_no(o.gemv_row_tiling), takes_bool,
         "let gemv_scalar share a weight load among rows of x"},
        {"FP4LINEAR_GEMV_MAX_M", o.gemv_max_m < 0 ? "measured" : std::to_string(o.gemv_max_m), takes_max_m,
         "largest M that a GEMV path takes"},
        {"FP4LINEAR_LOG", yes_no(o.log), takes_bool, "print the plan of every call to stderr"},
    };
}

}  // namespace fp4linear
