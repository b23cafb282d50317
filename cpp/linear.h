// The layer: an immutable NVFP4 weight on one device with its factors, and the call that runs it.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/cpu.h"
#include "cuda/weight.h"
#include "options.h"
#include "plan.h"
#include "problem.h"

namespace fp4linear {

// What a layer is made from: host arrays, C-contiguous, only read during construction.
struct LinearArguments {
    std::int64_t n = 0, k = 0;
    int block_size = 16;
    const std::uint8_t* b = nullptr;       // [n, k/2]
    const std::uint8_t* scales = nullptr;  // [n, ceil(k/block_size)]
    std::vector<float> scale2;             // one, or n
    std::vector<float> bias;               // none, or n
    NanScales nan_scales = NanScales::error;
    std::optional<int> cuda_device;  // nothing: the CPU
};

class Linear {
   public:
    // Throws std::invalid_argument for NaN scales (where they are an error), a scale2 that is not finite, or an
    // instruction set or path that does not exist or cannot run here.
    Linear(LinearArguments arguments, Options options);

    [[nodiscard]] std::int64_t out_features() const { return n_; }
    [[nodiscard]] std::int64_t in_features() const { return k_; }
    [[nodiscard]] int block_size() const { return block_size_; }
    [[nodiscard]] const std::vector<float>& scale2() const { return scale2_; }
    [[nodiscard]] const std::vector<float>& bias() const { return bias_; }
    [[nodiscard]] NanScales nan_scales() const { return nan_scales_; }
    [[nodiscard]] const Options& options() const { return options_; }
    [[nodiscard]] const cpu::Isa& isa() const { return *isa_; }
    [[nodiscard]] std::optional<int> cuda_device() const { return cuda_device_; }
    [[nodiscard]] std::size_t nbytes() const;  // of the weight, its factors and the bias, as held

    [[nodiscard]] Plan plan(std::int64_t m, DType dtype) const;

    // b [n, k/2] and scales [n, ceil(k/block_size)] as they were given, bit for bit.
    void canonical(std::uint8_t* b, std::uint8_t* scales) const;
    void dequantize(float* w) const;  // [n, k]
    // Of a layer on a GPU, enqueued on the stream: cuda::dequantize_rows(). std::invalid_argument where it is on the
    // CPU or has not these rows, or scale2 is given and the layer has one for all rows.
    void dequantize_rows(std::int64_t first, std::int64_t count, DType dtype, void* out, float* scale2,
                         void* stream) const;

    // problem.n, k and block_size are this layer's, x and y on its device. Returns the path that ran, or nothing where
    // none had to. On a GPU, which must be current, the work is enqueued on the stream (a cudaStream_t).
    std::optional<PathId> forward(const Problem& problem, void* stream = nullptr) const;

   private:
    [[nodiscard]] PlanQuery query(std::int64_t m, DType dtype) const;
    [[nodiscard]] DeviceSpec device_spec(DType dtype) const;
    [[nodiscard]] PathId path_for(std::int64_t m, DType dtype) const;

    std::int64_t n_, k_;
    int block_size_;
    std::vector<float> scale2_, bias_;
    NanScales nan_scales_;
    Options options_;
    const cpu::Isa* isa_;
    // Scale bytes that NanScales::zero replaced, so that canonical() can give them back.
    std::vector<std::pair<std::int64_t, std::uint8_t>> replaced_scales_;
    std::optional<int> cuda_device_;
    int sm_count_ = 0;  // of the GPU
    WeightForm form_ = WeightForm::any;
    std::unique_ptr<cpu::Weight> cpu_weight_;  // one of the two
    std::unique_ptr<cuda::Weight> cuda_weight_;
    // Paths of small M by type of x, 1 + PathId, or 0 before the first such call: planning costs as much as a launch.
    static constexpr std::int64_t cached_rows = 64;
    mutable std::array<std::array<std::atomic<std::uint8_t>, cached_rows + 1>, 3> cached_paths_{};
};

// The named instruction set, or the best for "". std::invalid_argument where it does not exist or can't run here.
const cpu::Isa* choose_isa(const std::string& name);
DeviceSpec cpu_device_spec(const cpu::Isa& isa, DType dtype);  // what the planner asks of the CPU

// y for K = 0, where every sum is empty: each row is the bias [n], or zeros for null. Host memory.
void fill_with_bias(const Problem& problem, const float* bias);

// std::invalid_argument naming the first factor that is not finite.
void check_finite(const std::vector<float>& scale2);

// Values of a canonical weight: out[n, k] = e2m1 * e4m3 * scale2, rounded once to fp32. scale2 has one element, or n.
void dequantize(std::int64_t n, std::int64_t k, int block_size, const std::uint8_t* b, const std::uint8_t* scales,
                const std::vector<float>& scale2, float* out);

}  // namespace fp4linear
