#include "linear.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "cpu/native.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/float16.h"

namespace fp4linear {
namespace {

struct NanCount {
    std::int64_t count = 0;
    std::int64_t first = -1;  // flat index
};

NanCount count_nan(const std::uint8_t* scales, std::int64_t count) {
    NanCount result;
    for (std::int64_t i = 0; i < count; ++i) {
        if (!is_e4m3_nan(scales[i])) continue;
        if (result.count++ == 0) result.first = i;
    }
    return result;
}

}  // namespace

const cpu::Isa* choose_isa(const std::string& name) {
    if (name.empty()) return &cpu::best_isa();
    const cpu::Isa* isa = cpu::find_isa(name);
    std::string names;
    for (const cpu::Isa& each : cpu::all_isas()) names += (names.empty() ? "" : ", ") + std::string(each.name);
    if (isa == nullptr) throw std::invalid_argument("isa='" + name + "': expected " + names);
    if (!isa->runs_here()) throw std::invalid_argument("isa='" + name + "': this CPU does not have it");
    return isa;
}

DeviceSpec cpu_device_spec(const cpu::Isa& isa, DType dtype) {
    DeviceSpec spec;
    spec.kernels = path_bit(PathId::cpu_gemv) | path_bit(PathId::cpu_gemm);
    spec.cpu_gemv_max_m = cpu::gemv_max_m(isa, dtype);
    return spec;
}

void fill_with_bias(const Problem& p, const float* bias) {
    const std::size_t element = size_of(p.dtype);
    std::vector<std::uint8_t> row(static_cast<std::size_t>(p.n) * element, 0);
    for (std::size_t n = 0; bias != nullptr && n < static_cast<std::size_t>(p.n); ++n) {
        if (p.dtype == DType::float32) {
            std::memcpy(row.data() + n * element, &bias[n], element);
        } else {
            const std::uint16_t bits =
                p.dtype == DType::float16 ? half_from_float(bias[n]) : bfloat_from_float(bias[n]);
            std::memcpy(row.data() + n * element, &bits, element);
        }
    }
    for (std::int64_t m = 0; m < p.m; ++m)
        std::memcpy(static_cast<std::uint8_t*>(p.y) + static_cast<std::size_t>(m) * row.size(), row.data(), row.size());
}

void check_finite(const std::vector<float>& scale2) {
    for (std::size_t i = 0; i < scale2.size(); ++i) {
        if (std::isfinite(scale2[i])) continue;
        const std::string where = scale2.size() == 1 ? "scale2" : "scale2[" + std::to_string(i) + "]";
        throw std::invalid_argument(where + " must be finite, got " + std::to_string(scale2[i]));
    }
}

Linear::Linear(LinearArguments a, Options options)
    : n_(a.n),
      k_(a.k),
      block_size_(a.block_size),
      scale2_(std::move(a.scale2)),
      bias_(std::move(a.bias)),
      nan_scales_(a.nan_scales),
      options_(std::move(options)),
      isa_(choose_isa(options_.cpu_isa)),
      cuda_device_(a.cuda_device) {
    check_finite(scale2_);
    if (!std::isfinite(options_.input_global_scale) || options_.input_global_scale < 0.0f)
        throw std::invalid_argument("the global scale of x must be finite and >= 0, got " +
                                    std::to_string(options_.input_global_scale));
    if (options_.path != "auto" && find_path(options_.path) == nullptr)
        throw std::invalid_argument("path='" + options_.path + "': expected auto, " + path_names());

    const std::int64_t row_blocks = blocks_per_row(k_, block_size_);
    const std::uint8_t* scales = a.scales;
    std::vector<std::uint8_t> cleaned;
    const NanCount nan = count_nan(a.scales, n_ * row_blocks);
    if (nan.count > 0 && nan_scales_ == NanScales::error) {
        throw std::invalid_argument("scales: " + std::to_string(nan.count) + " NaN scale byte(s), the first in row " +
                                    std::to_string(nan.first / row_blocks) + ", block " +
                                    std::to_string(nan.first % row_blocks) +
                                    "; nan_scales='zero' reads such a block as zero, 'propagate' as NaN");
    }
    if (nan.count > 0 && nan_scales_ == NanScales::zero) {
        cleaned.assign(a.scales, a.scales + n_ * row_blocks);
        for (std::int64_t i = nan.first; i < n_ * row_blocks; ++i) {
            if (!is_e4m3_nan(cleaned[i])) continue;
            replaced_scales_.emplace_back(i, cleaned[i]);
            cleaned[i] = 0;
        }
        scales = cleaned.data();
    }
    if (!cuda_device_) {
        cpu_weight_ = std::make_unique<cpu::Weight>(n_, k_, block_size_, a.b, scales);
        return;
    }
    const bool holds_nan = nan.count > 0 && nan_scales_ == NanScales::propagate;
    const DeviceSpec spec = cuda::device_spec(*cuda_device_);
    sm_count_ = spec.sm_count;
    form_ = cuda::choose_form(k_, block_size_, holds_nan, spec, options_);
    cuda::WeightArguments weight;
    weight.n = n_;
    weight.k = k_;
    weight.block_size = block_size_;
    weight.b = a.b;
    weight.scales = scales;
    weight.scale2 = &scale2_;
    weight.bias = &bias_;
    weight.device = *cuda_device_;
    weight.form = form_;
    weight.native = cuda::wants_native(n_, k_, block_size_, spec, options_);
    cuda_weight_ = cuda::make_weight(weight);
}

std::size_t Linear::nbytes() const {
    const std::size_t replaced = replaced_scales_.size() * sizeof(replaced_scales_[0]);
    if (cuda_weight_) return cuda_weight_->nbytes() + replaced;
    return cpu_weight_->nbytes() + (scale2_.size() + bias_.size()) * sizeof(float) + replaced;
}

PlanQuery Linear::query(std::int64_t m, DType dtype) const {
    return {.m = m, .n = n_, .k = k_, .block_size = block_size_, .dtype = dtype, .form = form_};
}

DeviceSpec Linear::device_spec(DType dtype) const {
    if (cuda_device_) return cuda::device_spec(*cuda_device_);
    DeviceSpec spec = cpu_device_spec(*isa_, dtype);
    spec.kernels |= path_bit(PathId::native_emulated);
    return spec;
}

Plan Linear::plan(std::int64_t m, DType dtype) const {
    return make_plan(query(m, dtype), device_spec(dtype), options_);
}

void Linear::canonical(std::uint8_t* b, std::uint8_t* scales) const {
    if (cuda_weight_) {
        cuda_weight_->canonical(b, scales);
    } else {
        cpu_weight_->canonical(b, scales);
    }
    for (const auto& [index, byte] : replaced_scales_) scales[index] = byte;
}

void Linear::dequantize(float* w) const {
    std::vector<std::uint8_t> b(static_cast<std::size_t>(n_ * (k_ / 2)));
    std::vector<std::uint8_t> scales(static_cast<std::size_t>(n_ * blocks_per_row(k_, block_size_)));
    canonical(b.data(), scales.data());
    for (const auto& [index, byte] : replaced_scales_) scales[index] = 0;  // NaN blocks that count as zero
    fp4linear::dequantize(n_, k_, block_size_, b.data(), scales.data(), scale2_, w);
}

void Linear::dequantize_rows(std::int64_t first, std::int64_t count, DType dtype, void* out, float* scale2,
                             void* stream) const {
    if (!cuda_weight_) throw std::invalid_argument("dequantize_rows: the layer is on the CPU");
    if (first < 0 || count < 0 || first > n_ - count)
        throw std::invalid_argument("dequantize_rows: rows " + std::to_string(first) + " to " +
                                    std::to_string(first + count) + " of a layer that has " + std::to_string(n_));
    if (scale2 != nullptr && scale2_.size() == 1)
        throw std::invalid_argument("dequantize_rows: the layer has one scale2 for all rows");
    if (count > 0 && k_ > 0) cuda::dequantize_rows(*cuda_weight_, first, count, dtype, out, scale2, stream);
}

PathId Linear::path_for(std::int64_t m, DType dtype) const {
    if (m > cached_rows) return choose_path(query(m, dtype), device_spec(dtype), options_);
    std::atomic<std::uint8_t>& cached = cached_paths_[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(m)];
    if (const std::uint8_t known = cached.load(std::memory_order_relaxed); known != 0)
        return static_cast<PathId>(known - 1);
    const PathId path = choose_path(query(m, dtype), device_spec(dtype), options_);
    cached.store(static_cast<std::uint8_t>(static_cast<int>(path) + 1), std::memory_order_relaxed);
    return path;
}

std::optional<PathId> Linear::forward(const Problem& problem, void* stream) const {
    if (options_.log) {
        const PlanQuery q = query(problem.m, problem.dtype);
        const std::string text = describe(make_plan(q, device_spec(problem.dtype), options_), q);
        std::fprintf(stderr, "fp4linear: %s\n", text.c_str());
    }
    if (problem.m == 0 || n_ == 0) return std::nullopt;
    if (k_ == 0) {
        if (cuda_weight_) {
            cuda::fill_with_bias(*cuda_weight_, problem, stream);
        } else {
            fill_with_bias(problem, bias_.empty() ? nullptr : bias_.data());
        }
        return std::nullopt;
    }
    const PathId path = path_for(problem.m, problem.dtype);
    if (cuda_weight_) {
        const cuda::CallOptions call{
            .rows_per_block = gemv_scalar_rows_per_block(problem.m, n_, sm_count_, options_.gemv_row_tiling),
            .batch_invariant = options_.batch_invariant,
            .input_global_scale = options_.input_global_scale};
        cuda::run(path, *cuda_weight_, problem, call, stream);
        return path;
    }
    const cpu::Epilogue epilogue{
        .scale2 = scale2_.data(), .per_row = scale2_.size() > 1, .bias = bias_.empty() ? nullptr : bias_.data()};
    const int threads = options_.num_threads > 0 ? options_.num_threads : cpu::default_threads();
    if (path == PathId::native_emulated) {
        cpu::run_native_emulated(cpu_weight_->view(), problem, epilogue, options_.input_global_scale, threads);
        return path;
    }
    const auto run = path == PathId::cpu_gemv ? isa_->gemv : isa_->gemm;
    run(cpu_weight_->view(), problem, epilogue, threads);
    return path;
}

void dequantize(std::int64_t n, std::int64_t k, int block_size, const std::uint8_t* b, const std::uint8_t* scales,
                const std::vector<float>& scale2, float* out) {
    struct Context {
        std::int64_t k;
        int block_size;
        const std::uint8_t *b, *scales;
        const std::vector<float>& scale2;
        float* out;
    } context{k, block_size, b, scales, scale2, out};
    const auto rows = [](void* opaque, std::int64_t begin, std::int64_t end) {
        const Context& c = *static_cast<const Context*>(opaque);
        const std::int64_t row_blocks = blocks_per_row(c.k, c.block_size);
        for (std::int64_t r = begin; r < end; ++r) {
            const std::uint8_t* codes = c.b + r * (c.k / 2);
            float* w = c.out + r * c.k;
            const float scale2_of_row = c.scale2[c.scale2.size() > 1 ? static_cast<std::size_t>(r) : 0];
            for (std::int64_t block = 0; block < row_blocks; ++block) {
                const float scale = e4m3_values[c.scales[r * row_blocks + block]];
                const std::int64_t end_k = std::min(c.k, (block + 1) * c.block_size);
                for (std::int64_t i = block * c.block_size; i < end_k; ++i)
                    w[i] = float_from_e2m1(e2m1_code(codes, i)) * scale * scale2_of_row;
            }
        }
    };
    cpu::parallel_for(n, cpu::default_threads(), rows, &context);
}

}  // namespace fp4linear
