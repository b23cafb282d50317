// The handler that XLA calls for fp4linear.jax.linear, on the CPU and on CUDA: y = x * W^T + bias with the weight, its
// factors and the bias as arguments. It holds no state and never takes the GIL.
//
//   arguments  x [..., M, K]; weight: uint8 [..., ceil(N/16), ceil(K/64), 576], or canonical b [..., N, K/2];
//              scale2: fp32 [..., N]; scales: uint8 [..., N, ceil(K/block_size)], canonical form only; bias: fp32
//              [..., N], where there is one
//   result     y [..., M, N] of x's type
//   attributes form, path: strings; block_size, batch_invariant: s64
//
// Leading axes are those of vmap: as many on every array, each of y's size or 1. Those along which only x runs fold
// into M; along the others the calls are made one by one.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "array.h"
#include "bindings.h"
#include "borrowed_weight.h"
#include "cpu/cpu.h"
#include "cuda/backend.h"
#include "cuda/borrowed.h"
#include "xla_ffi.h"

namespace fp4linear::python {
namespace {

namespace ffi = xla_ffi;

// XLA compares it with its own; jaxlib says which that is, and all that we support lay out what we read alike.
std::atomic<int> reported_api_minor{ffi::oldest_api_minor};

std::atomic<std::uint64_t> calls_of_process{0};

[[noreturn]] void invalid(const std::string& message) { throw std::invalid_argument(message); }

std::string shape_of(const ffi::Buffer& b) {
    std::string text = "[";
    for (std::int64_t i = 0; i < b.rank; ++i) text += (i == 0 ? "" : ", ") + std::to_string(b.dims[i]);
    return text + "]";
}

DType dtype_of(ffi::DataType type) {
    switch (type) {
        case ffi::type_f16: return DType::float16;
        case ffi::type_bf16: return DType::bfloat16;
        case ffi::type_f32: return DType::float32;
        default: invalid("x: expected float16, bfloat16 or float32, got XLA type " + std::to_string(type));
    }
}

const ffi::Buffer& buffer_of(const ffi::Values& values, std::int64_t index) {
    if (index >= values.size || values.kinds[index] != ffi::kind_buffer) invalid("an array is missing");
    return *static_cast<const ffi::Buffer*>(values.values[index]);
}

const void* find_attribute(const ffi::Attributes& attributes, std::string_view name, ffi::AttributeKind kind) {
    for (std::int64_t i = 0; i < attributes.size; ++i) {
        const ffi::ByteSpan& each = *attributes.names[i];
        if (std::string_view(each.data, each.size) == name && attributes.kinds[i] == kind) return attributes.values[i];
    }
    invalid("attribute " + std::string(name) + " is missing or of another type");
}

std::int64_t integer_attribute(const ffi::Attributes& attributes, std::string_view name) {
    const auto& scalar = *static_cast<const ffi::Scalar*>(find_attribute(attributes, name, ffi::attribute_scalar));
    if (scalar.type != ffi::type_s64) invalid("attribute " + std::string(name) + ": expected int64");
    std::int64_t value = 0;
    std::memcpy(&value, scalar.value, sizeof(value));
    return value;
}

std::string_view string_attribute(const ffi::Attributes& attributes, std::string_view name) {
    const auto& span = *static_cast<const ffi::ByteSpan*>(find_attribute(attributes, name, ffi::attribute_string));
    return {span.data, span.size};
}

BorrowedForm parse_form(std::string_view name) {
    for (int i = 0; i < borrowed_form_count; ++i)
        if (const auto form = static_cast<BorrowedForm>(i); name == name_of(form)) return form;
    invalid("form='" + std::string(name) + "': expected canonical, tiled or prepacked");
}

// One array of the call: its elements behind the leading axes, and how far apart these lie.
constexpr int most_leading = 8;

class Operand {
   public:
    Operand() = default;
    Operand(const char* name, const ffi::Buffer& buffer, ffi::DataType type, std::int64_t element_bytes,
            std::initializer_list<std::int64_t> shape, const ffi::Buffer& y, int leading)
        : data_(static_cast<const std::uint8_t*>(buffer.data)) {
        const auto own = static_cast<std::int64_t>(shape.size());
        bool fits = buffer.type == type && buffer.rank == leading + own;
        std::int64_t stride = element_bytes, at = leading;
        for (const std::int64_t size : shape) {
            fits = fits && buffer.dims[at++] == size;
            stride *= size;
        }
        for (int i = leading - 1; fits && i >= 0; --i) {
            fits = buffer.dims[i] == y.dims[i] || buffer.dims[i] == 1;
            strides_[static_cast<std::size_t>(i)] = buffer.dims[i] == 1 ? 0 : stride;
            stride *= buffer.dims[i];
        }
        if (fits) return;
        std::string expected = leading == 0 ? "[" : "[..., ";
        for (const std::int64_t size : shape)
            expected += (expected.back() == '[' || expected.back() == ' ' ? "" : ", ") + std::to_string(size);
        invalid(std::string(name) + ": expected " +
                (type == ffi::type_u8    ? "uint8 "
                 : type == ffi::type_f32 ? "float32 "
                                         : "x's type, ") +
                expected + "], got XLA type " + std::to_string(buffer.type) + " " + shape_of(buffer));
    }

    [[nodiscard]] bool repeats(int axis) const { return strides_[static_cast<std::size_t>(axis)] == 0; }
    template <class T>
    [[nodiscard]] const T* at(const std::array<std::int64_t, most_leading>& index, int axes) const {
        if (data_ == nullptr) return nullptr;
        std::int64_t offset = 0;
        for (int i = 0; i < axes; ++i)
            offset += index[static_cast<std::size_t>(i)] * strides_[static_cast<std::size_t>(i)];
        return reinterpret_cast<const T*>(data_ + offset);
    }

   private:
    const std::uint8_t* data_ = nullptr;
    std::array<std::int64_t, most_leading> strides_{};
};

const Options& options_of_process() {
    static const Options options = options_from_environment();
    return options;
}

void* stream_of(const ffi::CallFrame& frame) {
    ffi::StreamGetArguments arguments{sizeof(ffi::StreamGetArguments), nullptr, frame.execution, nullptr};
    if (ffi::Error* const failure = frame.api->stream_get(&arguments); failure != nullptr) {
        ffi::ErrorDestroyArguments destroy{sizeof(ffi::ErrorDestroyArguments), nullptr, failure};
        frame.api->error_destroy(&destroy);
        throw std::runtime_error("XLA gives no stream");
    }
    return arguments.stream;
}

void run_call(const ffi::CallFrame& frame, bool on_cuda) {
    const ffi::Attributes& attributes = frame.attributes;
    BorrowedWeight weight;
    weight.form = parse_form(string_attribute(attributes, "form"));
    const std::int64_t block_size = integer_attribute(attributes, "block_size");
    Options options = options_of_process();
    if (const std::string_view path = string_attribute(attributes, "path"); path != "auto") options.path = path;
    options.batch_invariant = integer_attribute(attributes, "batch_invariant") != 0;
    if (block_size < 1 || block_size > 1 << 30) invalid("block_size: got " + std::to_string(block_size));

    const bool canonical = weight.form == BorrowedForm::canonical;
    if (weight.form == (on_cuda ? BorrowedForm::tiled : BorrowedForm::prepacked))
        invalid(std::string("the parameters were made for a ") + (on_cuda ? "CPU" : "GPU") +
                " and the call runs on a " + (on_cuda ? "GPU" : "CPU") + ": make them with form='" +
                (on_cuda ? "prepacked" : "tiled") + "', or 'canonical', which runs on both");
    const std::int64_t least = canonical ? 4 : 3;
    if (frame.arguments.size != least && frame.arguments.size != least + 1)
        invalid("expected " + std::to_string(least) + " or " + std::to_string(least + 1) + " arrays, got " +
                std::to_string(frame.arguments.size));
    const ffi::Buffer& x_buffer = buffer_of(frame.arguments, 0);
    const ffi::Buffer& y_buffer = buffer_of(frame.results, 0);
    if (x_buffer.rank < 2 || x_buffer.rank > 2 + most_leading || y_buffer.rank != x_buffer.rank)
        invalid("x and y: expected [..., M, K] and [..., M, N], got " + shape_of(x_buffer) + " and " +
                shape_of(y_buffer));
    const int leading = static_cast<int>(x_buffer.rank) - 2;

    Problem p;
    p.m = x_buffer.dims[leading];
    p.k = x_buffer.dims[leading + 1];
    p.n = y_buffer.dims[leading + 1];
    p.block_size = static_cast<int>(block_size);
    p.dtype = dtype_of(x_buffer.type);
    const auto element = static_cast<std::int64_t>(size_of(p.dtype));
    if (on_cuda && p.dtype == DType::float32) invalid("x: expected float16 or bfloat16 on a GPU, got float32");
    if (p.k % 2 != 0) invalid("x: K must be even, got " + shape_of(x_buffer));
    if (const std::string unmet = unmet_by_form(weight.form, p.k, p.block_size); !unmet.empty()) invalid(unmet);

    const auto operand = [&](const char* name, std::int64_t index, ffi::DataType type, std::int64_t bytes,
                             std::initializer_list<std::int64_t> shape) {
        return Operand(name, buffer_of(frame.arguments, index), type, bytes, shape, y_buffer, leading);
    };
    const Operand x = operand("x", 0, x_buffer.type, element, {p.m, p.k});
    const Operand y("y", y_buffer, x_buffer.type, element, {p.m, p.n}, y_buffer, leading);
    const auto up = [](std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit; };
    const Operand units =
        canonical ? operand("weight", 1, ffi::type_u8, 1, {p.n, p.k / 2})
                  : operand("weight", 1, ffi::type_u8, 1, {up(p.n, unit_rows), up(p.k, unit_k), unit_bytes});
    const Operand scale2 = operand("scale2", 2, ffi::type_f32, sizeof(float), {p.n});
    const Operand scales =
        canonical ? operand("scales", 3, ffi::type_u8, 1, {p.n, blocks_per_row(p.k, p.block_size)}) : Operand();
    const bool has_bias = frame.arguments.size > least;
    const Operand bias = has_bias ? operand("bias", least, ffi::type_f32, sizeof(float), {p.n}) : Operand();

    // The innermost leading axes along which only x runs are more rows of it.
    const auto only_x_runs = [&](int axis) {
        return y_buffer.dims[axis] == 1 || (!x.repeats(axis) && units.repeats(axis) && scale2.repeats(axis) &&
                                            scales.repeats(axis) && bias.repeats(axis));
    };
    int axes = leading;
    while (axes > 0 && only_x_runs(axes - 1)) p.m *= y_buffer.dims[--axes];
    std::int64_t calls = 1;
    for (int i = 0; i < axes; ++i) calls *= y_buffer.dims[i];
    if (calls == 0 || p.m == 0 || p.n == 0) return;

    void* stream = nullptr;
    if (on_cuda) {
        stream = stream_of(frame);
        weight.cuda_device = cuda::current_device();
        cuda::prepare_device(*weight.cuda_device);
    }
    p.x_row_stride = p.k;
    std::array<std::int64_t, most_leading> index{};
    for (std::int64_t call = 0; call < calls; ++call) {
        p.x = x.at<void>(index, axes);
        p.y = const_cast<void*>(y.at<void>(index, axes));
        weight.weight = units.at<std::uint8_t>(index, axes);
        weight.scales = scales.at<std::uint8_t>(index, axes);
        weight.scale2 = scale2.at<float>(index, axes);
        weight.bias = bias.at<float>(index, axes);
        forward(weight, p, options, stream);
        for (int i = axes - 1; i >= 0 && ++index[static_cast<std::size_t>(i)] == y_buffer.dims[i]; --i)
            index[static_cast<std::size_t>(i)] = 0;
    }
}

ffi::Error* error(const ffi::CallFrame& frame, ffi::ErrorCode code, const char* message) noexcept {
    // Built without the heap: the reason may be that it is full.
    char text[2048] = "fp4linear.jax: ";
    std::strncat(text, message, sizeof(text) - std::strlen(text) - 1);
    ffi::ErrorCreateArguments arguments{sizeof(ffi::ErrorCreateArguments), nullptr, text, code};
    return frame.api->error_create(&arguments);
}

ffi::Error* handle(ffi::CallFrame& frame, bool on_cuda) noexcept {
    if (frame.extensions != nullptr && frame.extensions->type == ffi::extension_metadata) {
        ffi::Metadata& metadata = *reinterpret_cast<ffi::MetadataExtension*>(frame.extensions)->metadata;
        metadata.version.major = ffi::api_major;
        metadata.version.minor = reported_api_minor;
        metadata.traits = on_cuda ? ffi::trait_command_buffer_compatible : 0;
        return nullptr;
    }
    if (frame.stage != ffi::stage_execute) return nullptr;
    calls_of_process.fetch_add(1, std::memory_order_relaxed);
    try {
        run_call(frame, on_cuda);
        return nullptr;
    } catch (const std::invalid_argument& e) {
        return error(frame, ffi::error_invalid_argument, e.what());
    } catch (const std::bad_alloc&) {
        return error(frame, ffi::error_resource_exhausted, "out of memory");
    } catch (const std::exception& e) {
        return error(frame, ffi::error_internal, e.what());
    } catch (...) {
        return error(frame, ffi::error_internal, "unknown exception");
    }
}

ffi::Error* handle_cpu(ffi::CallFrame* frame) { return handle(*frame, false); }
ffi::Error* handle_cuda(ffi::CallFrame* frame) { return handle(*frame, true); }

nb::dict xla_ffi_handlers(int major, int minor) {
    if (major != ffi::api_major || minor < ffi::oldest_api_minor)
        throw nb::import_error(("XLA's foreign function interface has version " + std::to_string(major) + "." +
                                std::to_string(minor) + "; this build knows " + std::to_string(ffi::api_major) + "." +
                                std::to_string(ffi::oldest_api_minor) + " and later minor ones")
                                   .c_str());
    reported_api_minor = minor;
    nb::dict handlers;
    handlers["cpu"] = nb::capsule(reinterpret_cast<const void*>(handle_cpu));
    handlers["CUDA"] = nb::capsule(reinterpret_cast<const void*>(handle_cuda));
    return handlers;
}

// The form that a weight should have on a device, as Fp4Linear chooses it there.
std::string weight_form(const std::string& platform, std::int64_t k, int block_size, bool has_nan_scales) {
    if (platform == "cpu")
        return name_of(unmet_by_form(BorrowedForm::tiled, k, block_size).empty() ? BorrowedForm::tiled
                                                                                 : BorrowedForm::canonical);
    bool prepacked = !has_nan_scales && unmet_by_form(BorrowedForm::prepacked, k, block_size).empty();
    if (prepacked && cuda::device_count() > 0)
        prepacked = cuda::choose_form(k, block_size, has_nan_scales, cuda::device_spec(0),
                                      options_from_environment()) == WeightForm::prepacked;
    return name_of(prepacked ? BorrowedForm::prepacked : BorrowedForm::canonical);
}

struct PackedShape {
    BorrowedForm form;
    std::int64_t n, k;
    int block_size;
    [[nodiscard]] std::vector<std::int64_t> units() const {
        return {(n + unit_rows - 1) / unit_rows, (k + unit_k - 1) / unit_k, unit_bytes};
    }
};

PackedShape packed_shape(std::int64_t n, std::int64_t k, int block_size, const std::string& form) {
    if (block_size < 1) value_error("block_size: expected a number >= 1, got " + std::to_string(block_size));
    const PackedShape shape{parse_form(form), n, k, block_size};
    if (shape.form == BorrowedForm::canonical) value_error("form: expected 'tiled' or 'prepacked', got 'canonical'");
    if (const std::string unmet = unmet_by_form(shape.form, k, block_size); !unmet.empty()) value_error(unmet);
    return shape;
}

Array import_bytes(nb::handle object, const char* name, const std::vector<std::int64_t>& shape) {
    Array array = import_array(object, name, Gradient::ignore);
    const int ndim = static_cast<int>(shape.size());
    if (array.element != Element::uint8 || array.ndim != ndim || !std::equal(shape.begin(), shape.end(), array.shape))
        value_error(std::string(name) + ": expected uint8 " + shape_text(shape.data(), ndim) + ", got " + array.dtype +
                    " " + array.shape_text());
    return array;
}

nb::object pack_weight(nb::handle b, nb::handle scales, std::int64_t n, std::int64_t k, int block_size,
                       const std::string& form) {
    const PackedShape shape = packed_shape(n, k, block_size, form);
    const Array codes = import_bytes(b, "b", {n, k / 2});
    const Array factors = import_bytes(scales, "scales", {n, blocks_per_row(k, block_size)});
    std::vector<std::uint8_t> codes_storage, factors_storage;
    const std::uint8_t* codes_data = codes.contiguous(codes_storage);
    const std::uint8_t* factors_data = factors.contiguous(factors_storage);
    nb::object units = numpy_empty(shape.units(), "uint8");
    auto* data = static_cast<std::uint8_t*>(numpy_data(units));
    {
        nb::gil_scoped_release unlocked;
        pack(shape.form, n, k, block_size, codes_data, factors_data, data);
    }
    return units;
}

nb::tuple unpack_weight(nb::handle units, std::int64_t n, std::int64_t k, int block_size, const std::string& form) {
    const PackedShape shape = packed_shape(n, k, block_size, form);
    const Array packed = import_bytes(units, "weight", shape.units());
    std::vector<std::uint8_t> storage;
    const std::uint8_t* from = packed.contiguous(storage);
    nb::object b = numpy_empty({n, k / 2}, "uint8");
    nb::object scales = numpy_empty({n, blocks_per_row(k, block_size)}, "uint8");
    auto* b_data = static_cast<std::uint8_t*>(numpy_data(b));
    auto* scales_data = static_cast<std::uint8_t*>(numpy_data(scales));
    {
        nb::gil_scoped_release unlocked;
        unpack(shape.form, n, k, block_size, from, b_data, scales_data);
    }
    return nb::make_tuple(b, scales);
}

}  // namespace

void bind_xla(nb::module_& m) {
    m.def("xla_ffi_handlers", xla_ffi_handlers, nb::arg("major"), nb::arg("minor"),
          nb::sig("def xla_ffi_handlers(major: int, minor: int) -> dict[str, object]"),
          "Platform to the capsule of its XLA FFI handler, which will say that it has this version of the API (the one "
          "that jaxlib has). ImportError for a version that is not known.");
    m.def(
        "xla_handler_calls", [] { return calls_of_process.load(); },
        "How often XLA has called a handler in this process: less often than it ran the call, where it replays a CUDA "
        "graph.");
    m.def("weight_form", weight_form, nb::arg("platform"), nb::arg("k"), nb::arg("block_size"),
          nb::arg("has_nan_scales"),
          "The form of a weight on 'cpu' or 'gpu' that the fastest paths read: 'tiled', 'prepacked' or 'canonical'.");
    m.def("pack_weight", pack_weight, nb::arg("b"), nb::arg("scales"), nb::arg("n"), nb::arg("k"),
          nb::arg("block_size"), nb::arg("form"),
          nb::sig("def pack_weight(b: typing.Any, scales: typing.Any, n: int, k: int, block_size: int, form: str) -> "
                  "numpy.typing.NDArray[numpy.uint8]"),
          "Canonical host arrays as units of 16 rows x 64 K: uint8 [ceil(N/16), ceil(K/64), 576]. form: 'tiled' or "
          "'prepacked'. A prepacked weight may have no NaN scale.");
    m.def("unpack_weight", unpack_weight, nb::arg("weight"), nb::arg("n"), nb::arg("k"), nb::arg("block_size"),
          nb::arg("form"),
          nb::sig("def unpack_weight(weight: typing.Any, n: int, k: int, block_size: int, form: str) -> "
                  "tuple[numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.uint8]]"),
          "(b, scales) of a weight in units, bit for bit.");
}

}  // namespace fp4linear::python
