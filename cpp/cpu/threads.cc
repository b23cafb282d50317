// How many threads a call uses.
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "cpu/cpu.h"

namespace fp4linear::cpu {
namespace {

constexpr int most_threads = 1024;  // more than any host has cores for; a typing error is caught above it

// The CPU share of the container, rounded up to whole cores; 0 where there is no limit.
int cgroup_cores() {
    const auto whole = [](double quota, double period) {
        return quota > 0 && period > 0 ? static_cast<int>(std::min(quota / period + 0.999, 1e4)) : 0;
    };
    std::string quota;
    double period = 0;
    if (std::ifstream v2("/sys/fs/cgroup/cpu.max"); v2 >> quota >> period) {
        return quota == "max" ? 0 : whole(std::strtod(quota.c_str(), nullptr), period);
    }
    double quota_us = 0;
    std::ifstream v1_quota("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
    std::ifstream v1_period("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    if (v1_quota >> quota_us && v1_period >> period) return whole(quota_us, period);
    return 0;
}

int cores_allowed() {
    int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) cores = std::max(1, CPU_COUNT(&set));
#endif
    static const int share = cgroup_cores();  // files are read once; the affinity can change between calls
    return std::clamp(share > 0 ? std::min(cores, share) : cores, 1, most_threads);
}

}  // namespace

int default_threads() {
    const char* text = std::getenv("FP4LINEAR_NUM_THREADS");
    if (text == nullptr || *text == '\0') return cores_allowed();
    const std::string_view value(text);
    int threads = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), threads);
    if (error != std::errc() || end != value.data() + value.size() || threads < 1 || threads > most_threads) {
        throw std::invalid_argument("FP4LINEAR_NUM_THREADS must be an integer from 1 to " +
                                    std::to_string(most_threads) + ", got '" + std::string(value) + "'");
    }
    return threads;
}

}  // namespace fp4linear::cpu
