// The thread pool: every element once, exceptions, concurrent callers, nested calls, children of fork(), the
// caller's floating-point modes, and the parsing of FP4LINEAR_NUM_THREADS.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cpu/bandwidth.h"
#include "cpu/thread_pool.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

using namespace fp4linear;

namespace {

bool each_once(std::int64_t count, int threads) {
    std::vector<std::atomic<int>> seen(static_cast<std::size_t>(count));
    cpu::parallel_ranges(count, threads, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) seen[static_cast<std::size_t>(i)].fetch_add(1);
    });
    for (const auto& times : seen) {
        if (times.load() != 1) return false;
    }
    return true;
}

void every_element_once() {
    for (const int threads : {-1, 0, 1, 2, 3, 8, 40}) {
        for (const std::int64_t count : {0, 1, 2, 3, 7, 64, 1000, 1001}) CHECK(each_once(count, threads));
    }
    for (int i = 0; i < 3000; ++i) {
        if (!each_once(5, 1 + i % 4)) CHECK(false);
    }
}

void an_exception_reaches_the_caller() {
    for (const std::int64_t bad : {0, 99}) {
        bool caught = false;
        try {
            cpu::parallel_ranges(100, 3, [&](std::int64_t begin, std::int64_t end) {
                if (begin <= bad && bad < end) throw std::runtime_error("bad");
            });
        } catch (const std::runtime_error& error) {
            caught = std::string(error.what()) == "bad";
        }
        CHECK(caught);
        CHECK(each_once(100, 3));
    }
}

void concurrent_and_nested_callers() {
    std::atomic<int> good{0};
    std::vector<std::thread> callers;
    callers.reserve(6);
    for (int i = 0; i < 6; ++i) {
        callers.emplace_back([&] {
            for (int j = 0; j < 200; ++j) good += each_once(50, 3);
        });
    }
    for (auto& caller : callers) caller.join();
    CHECK_EQ(good.load(), 1200);

    std::atomic<int> inner{0};
    cpu::parallel_ranges(8, 4, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
            cpu::parallel_ranges(
                10, 4, [&](std::int64_t first, std::int64_t last) { inner += static_cast<int>(last - first); });
        }
    });
    CHECK_EQ(inner.load(), 80);
}

void a_child_of_fork_works() {
    CHECK(each_once(100, 3));  // the parent's workers exist
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);  // a hang ends as a failure
        _exit(each_once(100, 3) && each_once(100, 3) ? 0 : 1);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(each_once(100, 3));
}

void floating_point_modes_are_ours_and_restored() {
#if defined(__SSE2__)
    const unsigned before = _mm_getcsr();
    constexpr unsigned flush_and_round_down = 0x8040 | 0x2000;
    _mm_setcsr(before | flush_and_round_down);
    const unsigned changed = _mm_getcsr();
    std::atomic<int> wrong{0};
    for (const int threads : {1, 3}) {
        cpu::parallel_ranges(64, threads,
                             [&](std::int64_t, std::int64_t) { wrong += (_mm_getcsr() & 0xFFC0u) != 0x1F80u; });
    }
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    CHECK_EQ(wrong.load(), 0);
    CHECK_EQ(after, changed);
#endif
}

void the_environment_is_parsed_strictly() {
    const auto with = [](const char* value) {
        setenv("FP4LINEAR_NUM_THREADS", value, 1);
        std::string error;
        int threads = 0;
        try {
            threads = cpu::default_threads();
        } catch (const std::invalid_argument& e) {
            error = e.what();
        }
        unsetenv("FP4LINEAR_NUM_THREADS");
        return std::pair(threads, error);
    };
    CHECK_EQ(with("3").first, 3);
    CHECK_EQ(with("1024").first, 1024);
    for (const char* bad : {"0", "-1", "1025", "2x", " 2", "two", "1.5", "99999999999999999999"}) {
        const auto [threads, error] = with(bad);
        CHECK_EQ(threads, 0);
        CHECK(error.find("FP4LINEAR_NUM_THREADS") != std::string::npos && error.find(bad) != std::string::npos);
    }
    unsetenv("FP4LINEAR_NUM_THREADS");
    CHECK(cpu::default_threads() >= 1);
}

void bandwidth_is_plausible() {
    const double rate = cpu::read_bandwidth(std::size_t{8} << 20, 2, 2);
    CHECK(rate > 1e7 && rate < 1e14);
}

}  // namespace

int main() {
    every_element_once();
    an_exception_reaches_the_caller();
    concurrent_and_nested_callers();
    a_child_of_fork_works();
    floating_point_modes_are_ours_and_restored();
    the_environment_is_parsed_strictly();
    bandwidth_is_plausible();
    return check_report();
}
