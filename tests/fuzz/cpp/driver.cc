// What stands for libFuzzer where the compiler has none: random inputs and mutations of earlier ones, without coverage.
// Takes libFuzzer's -runs=N, -max_total_time=S and -seed=N, or files to run once.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

constexpr std::size_t longest = 1024;  // bytes of an input
constexpr std::size_t kept = 64;       // earlier inputs to mutate

const char* text(int count, char** arguments, const char* name, const char* fallback) {
    for (int i = 1; i < count; ++i)
        if (std::strncmp(arguments[i], name, std::strlen(name)) == 0) return arguments[i] + std::strlen(name);
    return fallback;
}

long option(int count, char** arguments, const char* name, long fallback) {
    const char* value = text(count, arguments, name, nullptr);
    return value == nullptr ? fallback : std::strtol(value, nullptr, 10);
}

void mutate(std::vector<std::uint8_t>& data, std::mt19937_64& random) {
    for (std::uint64_t times = 1 + random() % 4; times > 0; --times) {
        const std::size_t at = data.empty() ? 0 : random() % data.size();
        switch (random() % 5) {
            case 0:
                if (!data.empty()) data[at] = static_cast<std::uint8_t>(random());
                break;
            case 1:
                if (!data.empty()) data[at] ^= static_cast<std::uint8_t>(1u << random() % 8);
                break;
            case 2: data.resize(at); break;
            case 3:
                data.insert(data.begin() + static_cast<std::ptrdiff_t>(at), static_cast<std::uint8_t>(random()));
                break;
            default:
                for (std::uint64_t more = random() % 64; more > 0; --more)
                    data.push_back(static_cast<std::uint8_t>(random()));
        }
    }
    if (data.size() > longest) data.resize(longest);
}

}  // namespace

int main(int count, char** arguments) {
    bool files = false;
    for (int i = 1; i < count; ++i) {
        if (arguments[i][0] == '-') continue;
        if (!std::filesystem::is_regular_file(arguments[i])) continue;  // a corpus directory
        std::ifstream file(arguments[i], std::ios::binary);
        const std::vector<char> data{std::istreambuf_iterator<char>(file), {}};
        LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(data.data()), data.size());
        files = files || !data.empty();
    }
    if (files) return 0;
    const long runs = option(count, arguments, "-runs=", -1), seconds = option(count, arguments, "-max_total_time=", 0);
    std::mt19937_64 random(static_cast<std::uint64_t>(option(count, arguments, "-seed=", 1)));
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    std::vector<std::vector<std::uint8_t>> earlier(kept);
    long done = 0;
    // Written before each run: what an abort leaves is the input that caused it.
    const std::string last = std::string(text(count, arguments, "-artifact_prefix=", "")) + "last-input";
    while ((runs < 0 || done < runs) && (seconds == 0 || std::chrono::steady_clock::now() < end)) {
        auto& data = earlier[random() % kept];
        if (random() % 8 == 0) data.assign(random() % longest, 0);
        mutate(data, random);
        std::ofstream(last, std::ios::binary)
            .write(reinterpret_cast<const char*>(data.data()), static_cast<std::streamsize>(data.size()));
        LLVMFuzzerTestOneInput(data.data(), data.size());
        ++done;
    }
    std::fprintf(stderr, "Done %ld runs\n", done);
    return 0;
}
