// Weights in the caller's memory: the same bits as a layer that owns its weight, wherever that memory starts, and the
// forms there and back.
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <vector>

#include "borrowed_weight.h"
#include "check.h"
#include "formats/float16.h"
#include "linear.h"

using namespace fp4linear;

namespace {

struct Case {
    std::int64_t n, k;
    int block_size;
    std::vector<std::uint8_t> b, scales;
    std::vector<float> scale2, bias;

    Case(std::int64_t n, std::int64_t k, int block_size, unsigned seed) : n(n), k(k), block_size(block_size) {
        std::mt19937 random(seed);
        b.resize(static_cast<std::size_t>(n * (k / 2)));
        scales.resize(static_cast<std::size_t>(n * blocks_per_row(k, block_size)));
        for (auto& byte : b) byte = static_cast<std::uint8_t>(random());
        for (auto& byte : scales) byte = static_cast<std::uint8_t>((random() % 0x50 + 0x10) | (random() % 2) << 7);
        for (std::int64_t i = 0; i < n; ++i) {
            scale2.push_back(static_cast<float>(static_cast<int>(random() % 200) - 100) / 64.0f);
            bias.push_back(static_cast<float>(static_cast<int>(random() % 200) - 100));
        }
    }
};

// Exactly these bytes from a multiple of 64, plus an offset: what is read beyond them is an error under ASan.
class Bytes {
   public:
    Bytes(const std::vector<std::uint8_t>& bytes, std::size_t offset)
        : storage_(static_cast<std::uint8_t*>(::operator new(bytes.size() + offset, std::align_val_t(64)))),
          data_(storage_ + offset) {
        if (!bytes.empty()) std::memcpy(data_, bytes.data(), bytes.size());
    }
    ~Bytes() { ::operator delete(storage_, std::align_val_t(64)); }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    [[nodiscard]] const std::uint8_t* data() const { return data_; }

   private:
    std::uint8_t* storage_;
    std::uint8_t* data_;
};

std::size_t units_bytes(std::int64_t n, std::int64_t k) {
    return static_cast<std::size_t>((n + unit_rows - 1) / unit_rows * ((k + unit_k - 1) / unit_k)) * unit_bytes;
}

std::vector<std::uint16_t> run(const Case& c, std::int64_t m, const std::vector<std::uint16_t>& x, auto&& forward) {
    std::vector<std::uint16_t> y(static_cast<std::size_t>(m * c.n), 0x7E01);  // NaN: what is not written shows
    Problem p;
    p.m = m;
    p.n = c.n;
    p.k = c.k;
    p.block_size = c.block_size;
    p.dtype = DType::float16;
    p.x = x.data();
    p.x_row_stride = c.k;
    p.y = y.data();
    forward(p);
    return y;
}

void the_bits_of_a_layer() {
    unsigned seed = 0;
    for (const std::int64_t n : {0, 1, 16, 33}) {
        for (const std::int64_t k : {0, 2, 64, 130, 320}) {
            for (const int block_size : {16, 48, 1000}) {
                const Case c(n, k, block_size, ++seed);
                LinearArguments arguments;
                arguments.n = n;
                arguments.k = k;
                arguments.block_size = block_size;
                arguments.b = c.b.data();
                arguments.scales = c.scales.data();
                arguments.scale2 = c.scale2;
                arguments.bias = c.bias;
                const Linear layer(std::move(arguments), Options());
                std::vector<std::uint8_t> units(units_bytes(n, k));
                pack(BorrowedForm::tiled, n, k, block_size, c.b.data(), c.scales.data(), units.data());
                std::vector<std::uint8_t> b(c.b.size()), scales(c.scales.size());
                unpack(BorrowedForm::tiled, n, k, block_size, units.data(), b.data(), scales.data());
                CHECK(b == c.b && scales == c.scales);
                for (const std::int64_t m : {0, 1, 5, 70}) {
                    std::vector<std::uint16_t> x(static_cast<std::size_t>(m * k));
                    for (std::size_t i = 0; i < x.size(); ++i)
                        x[i] = half_from_float((static_cast<float>((i * 37 + 11) % 101) - 50.0f) / 16.0f);
                    const auto want = run(c, m, x, [&](const Problem& p) { layer.forward(p); });
                    for (const std::size_t offset : {0, 1, 16, 63}) {
                        const Bytes held(units, offset);
                        BorrowedWeight w;
                        w.form = BorrowedForm::tiled;
                        w.weight = held.data();
                        w.scale2 = c.scale2.data();
                        w.bias = c.bias.data();
                        CHECK(run(c, m, x, [&](const Problem& p) { forward(w, p, Options()); }) == want);
                    }
                    // Canonical: always through the blocked path.
                    BorrowedWeight w;
                    w.weight = c.b.data();
                    w.scales = c.scales.data();
                    w.scale2 = c.scale2.data();
                    w.bias = c.bias.data();
                    Options gemm;
                    gemm.path = "cpu_gemm";
                    const auto got = run(c, m, x, [&](const Problem& p) { forward(w, p, Options()); });
                    CHECK(run(c, m, x, [&](const Problem& p) { forward(w, p, gemm); }) == got);
                    for (const std::uint16_t bits : got) CHECK((bits & 0x7FFF) <= 0x7C00);
                }
            }
        }
    }
}

void prepacked_and_back() {
    for (const std::int64_t n : {1, 16, 33}) {
        for (const std::int64_t k : {64, 192}) {
            const Case c(n, k, 16, static_cast<unsigned>(n + k));
            std::vector<std::uint8_t> units(units_bytes(n, k)), b(c.b.size()), scales(c.scales.size());
            pack(BorrowedForm::prepacked, n, k, 16, c.b.data(), c.scales.data(), units.data());
            unpack(BorrowedForm::prepacked, n, k, 16, units.data(), b.data(), scales.data());
            CHECK(b == c.b && scales == c.scales);
        }
    }
}

void forms() {
    CHECK(unmet_by_form(BorrowedForm::canonical, 130, 7).empty());
    CHECK(unmet_by_form(BorrowedForm::tiled, 130, 32).empty());
    CHECK(!unmet_by_form(BorrowedForm::tiled, 130, 7).empty());
    CHECK(unmet_by_form(BorrowedForm::prepacked, 128, 16).empty());
    CHECK(!unmet_by_form(BorrowedForm::prepacked, 130, 16).empty());
    CHECK(!unmet_by_form(BorrowedForm::prepacked, 128, 32).empty());
}

void a_path_that_cannot_run() {
    const Case c(16, 64, 16, 1);
    BorrowedWeight w;
    w.weight = c.b.data();
    w.scales = c.scales.data();
    w.scale2 = c.scale2.data();
    const std::vector<std::uint16_t> x(64);
    for (const char* path : {"gemv_scalar", "no_such_path"}) {
        Options options;
        options.path = path;
        bool refused = false;
        try {
            run(c, 1, x, [&](const Problem& p) { forward(w, p, options); });
        } catch (const std::invalid_argument&) {
            refused = true;
        }
        CHECK(refused);
    }
}

}  // namespace

int main() {
    the_bits_of_a_layer();
    prepacked_and_back();
    forms();
    a_path_that_cannot_run();
    return check_report();
}
