#include "cuda/device_weight.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/check.h"
#include "cuda/cublaslt.h"
#include "cuda/kernels.h"
#include "cuda/native_weight.h"
#include "cuda/prepacked.h"
#include "formats/native_weight.h"

namespace fp4linear::cuda {
namespace {

std::size_t code_bytes(const WeightArguments& a) { return static_cast<std::size_t>(a.n * (a.k / 2)); }
std::size_t scale_bytes(const WeightArguments& a) {
    return static_cast<std::size_t>(a.n * blocks_per_row(a.k, a.block_size));
}
std::size_t weight_bytes(const WeightArguments& a) {
    return a.form == WeightForm::prepacked ? prepacked::size(a.n, a.k) : code_bytes(a);
}

std::size_t swizzled_bytes(const WeightArguments& a) {
    return static_cast<std::size_t>(swizzle::size(a.n, blocks_per_row(a.k, a.block_size)));
}
// native_nvfp4 takes the canonical codes as they are unless some scale has a sign.
bool needs_own_codes(const WeightArguments& a) {
    return a.form == WeightForm::prepacked ||
           native_weight::has_signed_scale(a.scales, static_cast<std::int64_t>(scale_bytes(a)));
}

float largest_magnitude(const std::vector<float>& values, float if_empty) {
    float largest = values.empty() ? if_empty : 0.0f;
    for (const float v : values) largest = std::max(largest, std::abs(v));
    return largest;
}

}  // namespace

DeviceWeight::DeviceWeight(const WeightArguments& a)
    : device(a.device),
      facts(device_facts(a.device)),
      n(a.n),
      k(a.k),
      block_size(a.block_size),
      form(a.form),
      per_row(a.scale2->size() > 1),
      scale2(a.scale2->empty() ? 1.0f : a.scale2->front()),
      largest_scale2(largest_magnitude(*a.scale2, scale2)),
      gemv_scratch(a.form == WeightForm::prepacked ? gemv_tensor_core_workspace(a.n, a.k, facts.max_shared_memory) : 0),
      weight_(weight_bytes(a)),
      scales_(a.form == WeightForm::prepacked ? 0 : scale_bytes(a)),
      scale2_(per_row ? a.scale2->size() * sizeof(float) : 0),
      bias_(a.bias->size() * sizeof(float)),
      native_codes_(a.native && needs_own_codes(a) ? code_bytes(a) : 0),
      swizzled_scales_(a.native ? swizzled_bytes(a) : 0),
      native_bytes_((native_codes_.get() != nullptr ? code_bytes(a) : 0) + (a.native ? swizzled_bytes(a) : 0)) {
    if (form == WeightForm::prepacked) {
        const DeviceBuffer b(code_bytes(a), a.b), scales(scale_bytes(a), a.scales);  // freeing them synchronises
        FP4LINEAR_CUDA_CHECK(
            prepack(bytes(b), bytes(scales), n, k, static_cast<std::uint8_t*>(weight_.get()), nullptr));
        if (a.native) make_native(bytes(b), bytes(scales));
    } else {
        copy(weight_.get(), a.b, code_bytes(a));
        copy(scales_.get(), a.scales, scale_bytes(a));
        if (a.native) make_native(bytes(weight_), bytes(scales_));
    }
    if (per_row) copy(scale2_.get(), a.scale2->data(), a.scale2->size() * sizeof(float));
    copy(bias_.get(), a.bias->data(), a.bias->size() * sizeof(float));
    // A copy from pageable memory may return before it has arrived, and other streams do not wait for this one.
    FP4LINEAR_CUDA_CHECK(cudaStreamSynchronize(nullptr));
}

DeviceWeight::DeviceWeight(const BorrowedWeight& w, const Problem& p)
    : device(w.cuda_device.value()),
      facts(device_facts(device)),
      n(p.n),
      k(p.k),
      block_size(p.block_size),
      form(w.form == BorrowedForm::prepacked ? WeightForm::prepacked : WeightForm::canonical),
      per_row(true),
      scale2(1.0f),
      largest_scale2(std::numeric_limits<float>::infinity()),  // the factors are on the device: any may be large
      gemv_scratch(form == WeightForm::prepacked ? gemv_tensor_core_workspace(n, k, facts.max_shared_memory) : 0),
      weight_(DeviceBuffer::borrow(w.weight)),
      scales_(DeviceBuffer::borrow(w.scales)),
      scale2_(DeviceBuffer::borrow(w.scale2)),
      bias_(DeviceBuffer::borrow(w.bias)),
      native_codes_(DeviceBuffer::borrow(nullptr)),
      swizzled_scales_(DeviceBuffer::borrow(nullptr)),
      native_bytes_(0) {}

void DeviceWeight::make_native(const std::uint8_t* canonical_b, const std::uint8_t* canonical_scales) {
    FP4LINEAR_CUDA_CHECK(native_weight_from_canonical(canonical_b, canonical_scales, n, k,
                                                      static_cast<std::uint8_t*>(native_codes_.get()),
                                                      static_cast<std::uint8_t*>(swizzled_scales_.get()), nullptr));
}

std::size_t DeviceWeight::nbytes() const {
    const WeightArguments sizes{.n = n, .k = k, .block_size = block_size, .form = form};
    std::size_t total = weight_bytes(sizes) + (form == WeightForm::prepacked ? 0 : scale_bytes(sizes)) + native_bytes_;
    const auto rows = static_cast<std::size_t>(n);
    if (per_row) total += rows * sizeof(float);
    if (bias_.get() != nullptr) total += rows * sizeof(float);
    return total;
}

void DeviceWeight::canonical(std::uint8_t* b_out, std::uint8_t* scales_out) const {
    const CurrentDevice current(device);
    const WeightArguments sizes{.n = n, .k = k, .block_size = block_size, .form = form};
    if (form == WeightForm::canonical) {
        copy(b_out, weight_.get(), code_bytes(sizes));
        copy(scales_out, scales_.get(), scale_bytes(sizes));
        return;
    }
    const DeviceBuffer b(code_bytes(sizes)), scales(scale_bytes(sizes));
    FP4LINEAR_CUDA_CHECK(unpack(prepacked(), n, k, static_cast<std::uint8_t*>(b.get()),
                                static_cast<std::uint8_t*>(scales.get()), nullptr));
    copy(b_out, b.get(), code_bytes(sizes));
    copy(scales_out, scales.get(), scale_bytes(sizes));
}

std::unique_ptr<Weight> make_weight(const WeightArguments& arguments) {
    const CurrentDevice current(arguments.device);
    if (cublaslt::available()) cublaslt::prepare_device();  // here, since the first call may be captured
    return std::make_unique<DeviceWeight>(arguments);
}

}  // namespace fp4linear::cuda
