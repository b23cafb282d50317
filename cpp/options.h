// Switches of a layer. Each FP4LINEAR_* environment variable gives the default of the argument of the same meaning.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace fp4linear {

enum class NanScales : std::uint8_t { error, zero, propagate };

struct Options {
    std::string path = "auto";     // FP4LINEAR_PATH: a path's name, or "auto" for the ladder
    std::string cpu_isa;           // FP4LINEAR_CPU_ISA: an instruction set's name, or "" for the best
    int num_threads = 0;           // FP4LINEAR_NUM_THREADS: > 0, or 0 for all the cores of this process
    bool native_nvfp4 = false;     // FP4LINEAR_NATIVE_NVFP4: let the ladder quantise x on Blackwell
    bool gemv_tensor_core = true;  // FP4LINEAR_GEMV_TENSOR_CORE
    bool gemv_row_tiling = true;   // FP4LINEAR_GEMV_ROW_TILING
    std::int64_t gemv_max_m = -1;  // FP4LINEAR_GEMV_MAX_M: >= 0, or -1 for the measured crossover
    bool batch_invariant = false;  // a row's bits may not depend on M; no environment variable
    bool log = false;              // FP4LINEAR_LOG: print the plan of every call to stderr

    // The native paths' global scale of x, in the reciprocal convention: x is multiplied by it before it is quantised.
    // 0: taken from the x of each call. No environment variable.
    float input_global_scale = 1.0f;
};

// Throws std::invalid_argument that names the variable, its value and what it takes.
Options options_from_environment();

struct Switch {
    const char* name;
    std::string value;  // as it is in force, after parsing
    const char* takes;
    const char* meaning;
};
std::vector<Switch> environment_table();

}  // namespace fp4linear
