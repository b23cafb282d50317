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
    // What native_nvfp4 reads (formats/native_weight.h): codes [n, k/2] row-major, the low nibble first, and scales in
    // the 128x4 layout; null where the layer was not made for it.
    [[nodiscard]] const std::uint8_t* native_codes() const {
        if (swizzled_scales() == nullptr) return nullptr;
        return native_codes_.get() != nullptr ? bytes(native_codes_) : b();
    }
    [[nodiscard]] const std::uint8_t* swizzled_scales() const { return bytes(swizzled_scales_); }
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

    void make_native(const std::uint8_t* canonical_b, const std::uint8_t* canonical_scales);

    DeviceBuffer weight_;        // prepacked, or the canonical codes
    DeviceBuffer scales_;        // canonical scales; empty where prepacked
    DeviceBuffer scale2_;        // [n]; empty where one factor serves all
    DeviceBuffer bias_;          // [n] fp32
    DeviceBuffer native_codes_;  // empty where native_nvfp4 can read the canonical ones
    DeviceBuffer swizzled_scales_;
    std::size_t native_bytes_;
};

}  // namespace fp4linear::cuda
