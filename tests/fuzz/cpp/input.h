// A fuzzer's bytes read as decisions, and the check that ends the process. No bytes left reads as zeros.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <vector>

inline void require(bool good, const char* file, int line, const char* text) {
    if (good) return;
    std::fprintf(stderr, "%s:%d: %s\n", file, line, text);
    std::abort();
}
#define REQUIRE(condition) require(static_cast<bool>(condition), __FILE__, __LINE__, #condition)

class Input {
   public:
    Input(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

    std::uint8_t byte() {
        if (left_ == 0) return 0;
        --left_;
        return *data_++;
    }
    std::uint32_t word() {
        std::uint32_t value = 0;
        for (int i = 0; i < 4; ++i) value = value << 8 | byte();
        return value;
    }
    float number() { return std::bit_cast<float>(word()); }
    bool flag() { return (byte() & 1) != 0; }
    // From `least` to `most`, both included, at most 256 apart.
    int from(int least, int most) { return least + byte() % (most - least + 1); }
    template <class T, std::size_t N>
    T one_of(const T (&options)[N]) {
        return options[byte() % N];
    }
    // Sizes at which arithmetic goes wrong, small ones, and any.
    std::int64_t size() {
        constexpr std::int64_t greatest = INT64_MAX;
        constexpr std::int64_t special[] = {0,
                                            1,
                                            2,
                                            7,
                                            8,
                                            9,
                                            15,
                                            16,
                                            31,
                                            32,
                                            63,
                                            64,
                                            65,
                                            128,
                                            1024,
                                            1025,
                                            1 << 16,
                                            1 << 30,
                                            greatest,
                                            greatest - 1,
                                            1LL << 31,
                                            1LL << 32,
                                            1LL << 53,
                                            1LL << 62,
                                            greatest - 7,
                                            greatest / 31};
        const std::uint8_t how = byte();
        if (how < 128) return special[how % std::size(special)];
        if (how < 192) return byte();
        const std::uint64_t any = static_cast<std::uint64_t>(word()) << 32 | word();
        return static_cast<std::int64_t>(any >> 1);
    }
    std::vector<std::uint8_t> bytes(std::size_t count) {
        std::vector<std::uint8_t> result(count);
        for (auto& each : result) each = byte();
        return result;
    }

   private:
    const std::uint8_t* data_;
    std::size_t left_;
};
