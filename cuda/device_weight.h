// What cuda::Weight is in a build with CUDA.
#pragma once
#include <memory>

#include "borrowed_weight.h"
#include "cuda/device_facts.h"
#include "cuda/memory.h"
#include "cuda/weight.h"

namespace fp4linear::cuda {

class DeviceWeight final : public Weight {
   public:
    explicit DeviceWeight(const WeightArguments& arguments);  // the current device is the weight's
    // Owns nothing, allocates nothing and asks the device for nothing: as good as a pointer, for one call.
    DeviceWeight(const BorrowedWeight& weight, const Problem& problem);

    void canonical(std::uint8_t* b, std::uint8_t* scales) const override;
    [[nodiscard]] std::size_t nbytes() const override;

    [[nodiscard]] const std::uint8_t* prepacked() const {
        return form == WeightForm::prepacked ? bytes(weight_) : nullptr;
    }
    [[nodiscard]] const std::uint8_t* b() const { return form == WeightForm::canonical ? bytes(weight_) : nullptr; }
    [[nodiscard]] const std::uint8_t* scales() const { return bytes(scales_); }
    [[nodiscard]] const float* scale2_rows() const {
        return per_row ? static_cast<const float*>(scale2_.get()) : nullptr;
    }
    [[nodiscard]] const float* bias() const { return static_cast<const float*>(bias_.get()); }

    const int device;
    const DeviceFacts& facts;
    const std::int64_t n, k;
    const int block_size;
    const WeightForm form;
    const bool per_row;
    const float scale2;              // where not per_row
    const float largest_scale2;      // max |scale2| of all rows
    const std::size_t gemv_scratch;  // bytes of Scratch::gemv_partials

   private:
    static const std::uint8_t* bytes(const DeviceBuffer& buffer) {
        return static_cast<const std::uint8_t*>(buffer.get());
    }

    DeviceBuffer weight_;  // prepacked, or the canonical codes
    DeviceBuffer scales_;  // canonical scales; empty where prepacked
    DeviceBuffer scale2_;  // [n]; empty where one factor serves all
    DeviceBuffer bias_;    // [n] fp32
};

}  // namespace fp4linear::cuda
