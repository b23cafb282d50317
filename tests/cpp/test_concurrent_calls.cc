// Threads that share layers and call them, plan, copy weights out, fail and make others at the same time: the bits of
// the serial calls, and under ThreadSanitizer no race.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "borrowed_weight.h"
#include "check.h"
#include "linear.h"
#include "quantize.h"

namespace {

using namespace fp4linear;

struct Shared {
    std::int64_t n = 70, k = 192;
    std::vector<std::uint8_t> b, scales;
    std::vector<float> scale2;

    Shared() : b(static_cast<std::size_t>(n * k / 2)), scales(static_cast<std::size_t>(n * k / 16)), scale2(70, 0.5f) {
        for (std::size_t i = 0; i < b.size(); ++i) b[i] = static_cast<std::uint8_t>(i * 37);
        for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<std::uint8_t>(0x30 + i % 16);
    }
    [[nodiscard]] LinearArguments arguments() const {
        LinearArguments a;
        a.n = n;
        a.k = k;
        a.b = b.data();
        a.scales = scales.data();
        a.scale2 = scale2;
        return a;
    }
};

struct Call {
    Problem problem;
    std::vector<float> x, y;

    Call(const Shared& w, std::int64_t m) : x(static_cast<std::size_t>(m * w.k)), y(static_cast<std::size_t>(m * w.n)) {
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 17) - 8.0f;
        problem.m = m;
        problem.n = w.n;
        problem.k = w.k;
        problem.dtype = DType::float32;
        problem.x = x.data();
        problem.x_row_stride = w.k;
        problem.y = y.data();
    }
};

void callers_of_one_layer() {
    const Shared w;
    Options options;
    options.num_threads = 3;
    const Linear serial(w.arguments(), options);
    constexpr std::int64_t rows[] = {1, 5, 40};
    std::vector<std::vector<float>> wanted;
    for (const std::int64_t m : rows) {
        Call call(w, m);
        serial.forward(call.problem);
        wanted.push_back(call.y);
    }
    const Linear layer(w.arguments(), options);  // no path of it is known yet: all threads find them
    BorrowedWeight borrowed;
    borrowed.weight = w.b.data();
    borrowed.scales = w.scales.data();
    borrowed.scale2 = w.scale2.data();
    std::atomic<int> good{0};
    constexpr int callers = 5, turns = 60;
    std::vector<std::thread> threads;
    threads.reserve(callers);
    for (int caller = 0; caller < callers; ++caller) {
        threads.emplace_back([&, caller] {
            for (int turn = 0; turn < turns; ++turn) {
                const auto at = static_cast<std::size_t>(caller + turn) % std::size(rows);
                Call call(w, rows[at]);
                bool right = true;
                switch ((caller + turn / 3) % 6) {
                    case 0:
                    case 1: layer.forward(call.problem); break;
                    case 2: forward(borrowed, call.problem, options); break;
                    case 3: Linear(w.arguments(), options).forward(call.problem); break;
                    case 4: {
                        std::vector<std::uint8_t> b(w.b.size()), scales(w.scales.size());
                        layer.canonical(b.data(), scales.data());
                        right = b == w.b && layer.plan(rows[at], DType::float32).found;
                        layer.forward(call.problem);
                        break;
                    }
                    default: {
                        Options unknown = options;
                        unknown.path = "no such path";
                        right = false;
                        try {
                            const Linear refused(w.arguments(), unknown);
                        } catch (const std::invalid_argument&) {
                            right = true;
                        }
                        std::vector<std::uint8_t> b(w.b.size()), scales(w.scales.size());
                        const std::vector<float> values(static_cast<std::size_t>(w.n * w.k), 1.5f);
                        quantize(w.n, w.k, values.data(), QuantizeMethod::max_abs, 0.01f, b.data(), scales.data());
                        layer.forward(call.problem);
                    }
                }
                good += right && call.y == wanted[at];
            }
        });
    }
    for (auto& thread : threads) thread.join();
    CHECK_EQ(good.load(), callers * turns);
}

}  // namespace

int main() {
    callers_of_one_layer();
    return check_report();
}
