// fp4linear.Fp4Linear.
#include "linear.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "array.h"
#include "bindings.h"
#include "cuda/backend.h"
#include "cuda/weight.h"
#include "device_call.h"
#include "formats/e2m1.h"

namespace fp4linear::python {
namespace {

std::uint64_t next_serial() {
    static std::atomic<std::uint64_t> serial{0};
    return ++serial;
}

// The layer as Python holds it. The weight never changes, so copies share it.
struct Layer {
    std::shared_ptr<const Linear> linear;
    std::uint64_t serial = next_serial();
};

// What the calling thread's last forward was, for Fp4Linear.last_path.
struct LastCall {
    std::uint64_t serial = 0;
    std::optional<PathId> path;
};
thread_local LastCall last_call;

struct Canonical {
    std::int64_t n = 0, k = 0;
    std::vector<std::uint8_t> b_storage, scales_storage;
    const std::uint8_t* b = nullptr;
    const std::uint8_t* scales = nullptr;
    Array b_array, scales_array;  // keep borrowed memory alive
};

NanScales parse_nan_scales(const std::string& text) {
    if (text == "error") return NanScales::error;
    if (text == "zero") return NanScales::zero;
    if (text == "propagate") return NanScales::propagate;
    value_error("nan_scales: expected 'error', 'zero' or 'propagate', got '" + text + "'");
}

const char* nan_scales_text(NanScales n) {
    return n == NanScales::error ? "error" : n == NanScales::zero ? "zero" : "propagate";
}

// "cuda", as torch and CuPy read it: after torch.cuda.set_device(1) it is the second GPU. JAX has no such setting, but
// makes the last GPU the thread's current one as it starts; by itself it means the first.
int default_gpu() {
    if (cuda::device_count() == 0) return 0;
    const nb::dict modules = nb::module_::import_("sys").attr("modules");
    // Neither is imported for this, and a torch that is still being imported counts as not there. torch is asked, not
    // the driver: it may put off a change of the current GPU until that one is used.
    const nb::object torch = nb::getattr(modules.get("torch", nb::none()), "cuda", nb::none());
    bool in_use = false;
    if (nb::hasattr(torch, "is_initialized") && nb::try_cast(torch.attr("is_initialized")(), in_use) && in_use)
        return nb::cast<int>(torch.attr("current_device")());
    return nb::object(modules.get("cupy", nb::none())).is_none() ? 0 : cuda::current_device();
}

// Where a layer is to be: what `device` says, else where b lives.
Place layer_place(const std::optional<std::string>& device, nb::handle b) {
    Place place;
    if (!device) {
        place = place_of(b);
        if (!place.cuda) return place;
    } else if (*device == "cpu") {
        return place;
    } else if (*device == "cuda") {
        place = place_of(b);
        if (!place.cuda) place = {.cuda = true, .index = default_gpu()};
    } else if (device->rfind("cuda:", 0) == 0 && device->size() > 5 && device->size() < 9 &&
               device->find_first_not_of("0123456789", 5) == std::string::npos) {
        place = {.cuda = true, .index = std::stoi(device->substr(5))};
    } else {
        value_error("device: expected None, 'cpu', 'cuda' or 'cuda:N', got '" + *device + "'");
    }
    const int count = cuda::device_count();
    if (place.index >= count)
        value_error("device='" + place_text(place) + "': " +
                    (count == 0 ? cuda_unavailable_reason() : "this machine has " + std::to_string(count) + " GPU(s)"));
    // A wheel of cuBLAS lies where no loader looks; what loads it once makes it known to the whole process.
    if (!cuda::cublaslt_available()) nb::module_::import_("fp4linear._libraries").attr("load_cublaslt")();
    return place;
}

void import_weight(Canonical& w, nb::handle b, nb::handle scales, int block_size) {
    w.b_array = import_array(on_host(b), "b", Gradient::ignore);
    const Array& ba = w.b_array;
    const bool one_code_a_byte = ba.element == Element::float4_e2m1fn;
    if (!one_code_a_byte && ba.element != Element::uint8 && ba.element != Element::int8 &&
        ba.element != Element::float4_e2m1fn_x2)
        type_error("b: expected uint8 (two E2M1 codes a byte), int8 or float4_e2m1, got " + ba.dtype);
    if (ba.ndim != 2) value_error("b: expected shape [N, K/2], got " + ba.shape_text());
    w.n = ba.shape[0];
    w.k = one_code_a_byte ? ba.shape[1] : 2 * ba.shape[1];
    if (w.k % 2 != 0) value_error("b: K must be even (two codes a byte), got shape " + ba.shape_text());

    w.scales_array = import_array(on_host(scales), "scales", Gradient::ignore);
    const Array& sa = w.scales_array;
    if (sa.element != Element::uint8 && sa.element != Element::float8_e4m3fn)
        type_error("scales: expected raw E4M3 bytes, uint8 or float8_e4m3fn, got " + sa.dtype);
    const std::int64_t blocks = blocks_per_row(w.k, block_size);
    if (sa.ndim != 2 || sa.shape[0] != w.n || sa.shape[1] != blocks) {
        std::string message = "scales: expected shape [N, ceil(K/block_size)] = [" + std::to_string(w.n) + ", " +
                              std::to_string(blocks) + "] for b of shape " + ba.shape_text() + " and block_size " +
                              std::to_string(block_size) + ", got " + sa.shape_text();
        const auto round_up = [](std::int64_t v, std::int64_t to) { return (v + to - 1) / to * to; };
        if (sa.ndim == 2 && sa.shape[0] == round_up(w.n, 128) && sa.shape[1] == round_up(blocks, 4))
            message += "; this is the padded shape of the swizzled 128x4 layout: pass plain scales";
        value_error(message);
    }

    w.scales = sa.contiguous(w.scales_storage);
    w.b = ba.contiguous(w.b_storage);
    if (one_code_a_byte) {
        std::vector<std::uint8_t> packed(static_cast<std::size_t>(w.n * (w.k / 2)));
        for (std::size_t i = 0; i < packed.size(); ++i) packed[i] = pack_e2m1(w.b[2 * i], w.b[2 * i + 1]);
        w.b_storage = std::move(packed);
        w.b = w.b_storage.data();
    }
}

float scalar_scale2(nb::handle object) {
    try {
        return static_cast<float>(nb::cast<double>(nb::float_(object)));
    } catch (nb::python_error& error) {
        if (!error.matches(PyExc_OverflowError)) throw;
    }
    value_error("scale2 must be finite in float32, got an integer beyond its range");
}

std::vector<float> import_scale2(nb::handle object, std::int64_t n) {
    constexpr const char* expected = "scale2: expected a number, or a float array of 1 or N elements, got ";
    PyObject* p = object.ptr();
    if (PyBool_Check(p)) type_error(std::string(expected) + "bool");
    if (PyFloat_Check(p) || PyLong_Check(p)) return {scalar_scale2(object)};
    if (nb::isinstance(object, numpy().attr("generic"))) {
        // ml_dtypes' scalars are neither np.integer nor np.floating.
        const auto module = nb::cast<std::string>(nb::str(object.type().attr("__module__")));
        if (!nb::isinstance(object, numpy().attr("integer")) && !nb::isinstance(object, numpy().attr("floating")) &&
            module != "ml_dtypes")
            type_error(std::string(expected) + nb::cast<std::string>(nb::str(object.type().attr("__name__"))));
        return {scalar_scale2(object)};
    }
    if (PyUnicode_Check(p) || object.is_none()) type_error(std::string(expected) + (object.is_none() ? "None" : "str"));
    const Array a = import_array(on_host(object), "scale2", Gradient::ignore);
    if (!is_float(a.element)) type_error(std::string(expected) + a.dtype);
    const bool scalar = a.size() == 1 && a.ndim <= 1;
    const bool per_row = a.ndim == 1 && a.shape[0] == n;
    if (!scalar && !per_row)
        value_error("scale2: expected 1 element or shape [N] = [" + std::to_string(n) + "], got " + a.shape_text());
    return to_floats(a);
}

std::vector<float> import_bias(nb::handle object, std::int64_t n) {
    if (object.is_none()) return {};
    const Array a = import_array(on_host(object), "bias", Gradient::ignore);
    if (!is_float(a.element) || a.element == Element::float64)
        type_error("bias: expected float16, bfloat16 or float32, got " + a.dtype);
    if (a.ndim != 1 || a.shape[0] != n)
        value_error("bias: expected shape [N] = [" + std::to_string(n) + "], got " + a.shape_text());
    return to_floats(a);
}

Options layer_options(const std::string& path, const std::optional<std::string>& isa, const std::optional<int>& threads,
                      bool batch_invariant, const std::optional<bool>& native, float input_global_scale) {
    Options options = options_from_environment();
    if (path != "auto") options.path = path;
    if (isa) options.cpu_isa = *isa;
    if (threads) {
        if (*threads < 1) value_error("threads: expected a number >= 1, got " + std::to_string(*threads));
        options.num_threads = *threads;
    }
    options.batch_invariant = batch_invariant;
    if (native) options.native_nvfp4 = *native;
    options.input_global_scale = input_global_scale;
    return options;
}

void check_block_size(int block_size) {
    if (block_size < 1) value_error("block_size: expected a number >= 1, got " + std::to_string(block_size));
}

Layer make_layer(nb::handle b, nb::handle scales, nb::handle scale2, nb::handle bias, int block_size,
                 const std::optional<std::string>& device, const std::string& nan_scales, const std::string& path,
                 const std::optional<std::string>& isa, const std::optional<int>& threads, bool batch_invariant,
                 const std::optional<bool>& native, nb::handle input_scale, nb::handle input_global_scale) {
    check_block_size(block_size);
    const Place place = layer_place(device, b);
    LinearArguments arguments;
    if (place.cuda) arguments.cuda_device = place.index;
    arguments.nan_scales = parse_nan_scales(nan_scales);
    Canonical weight;
    import_weight(weight, b, scales, block_size);
    arguments.n = weight.n;
    arguments.k = weight.k;
    arguments.block_size = block_size;
    arguments.b = weight.b;
    arguments.scales = weight.scales;
    arguments.scale2 = import_scale2(scale2, weight.n);
    arguments.bias = import_bias(bias, weight.n);
    Options options = layer_options(path, isa, threads, batch_invariant, native,
                                    parse_input_scales(input_scale, input_global_scale, "input_global_scale"));
    Layer layer;
    {
        nb::gil_scoped_release unlocked;
        layer.linear = std::make_shared<const Linear>(std::move(arguments), std::move(options));
    }
    return layer;
}

nb::object dequantize_arrays(nb::handle b, nb::handle scales, nb::handle scale2, int block_size) {
    check_block_size(block_size);
    Canonical weight;
    import_weight(weight, b, scales, block_size);
    const std::vector<float> factors = import_scale2(scale2, weight.n);
    check_finite(factors);
    nb::object w = numpy_empty({weight.n, weight.k}, "float32");
    auto* data = static_cast<float*>(numpy_data(w));
    {
        nb::gil_scoped_release unlocked;
        dequantize(weight.n, weight.k, block_size, weight.b, weight.scales, factors, data);
    }
    return w;
}

DType activation_dtype(const Array& x) {
    if (x.element == Element::float16) return DType::float16;
    if (x.element == Element::bfloat16) return DType::bfloat16;
    if (x.element == Element::float32) return DType::float32;
    type_error("x: expected float16, bfloat16 or (on the CPU) float32, got " + x.dtype);
}

struct ByteRange {
    std::uintptr_t begin, end;
};

ByteRange byte_range(const Array& a) {
    auto begin = reinterpret_cast<std::uintptr_t>(a.data);
    std::uintptr_t end = begin;
    for (int i = 0; i < a.ndim; ++i) {
        if (a.shape[i] == 0) return {begin, begin};
        const std::int64_t reach = (a.shape[i] - 1) * a.strides[i];
        (reach < 0 ? begin : end) += static_cast<std::uintptr_t>(reach);
    }
    return {begin, end + static_cast<std::uintptr_t>(a.item_size)};
}

void check_out(const Array& out, const Array& x, const std::vector<std::int64_t>& shape) {
    const int ndim = static_cast<int>(shape.size());
    if (out.element != x.element) type_error("out: expected " + x.dtype + ", the type of x, got " + out.dtype);
    if (out.ndim != ndim || !std::equal(shape.begin(), shape.end(), out.shape))
        value_error("out: expected shape " + python::shape_text(shape.data(), ndim) + ", got " + out.shape_text());
    if (out.read_only) value_error("out: the array is read-only");
    if (!out.is_contiguous()) value_error("out: expected a C-contiguous array");
    if (out.size() > 0 && reinterpret_cast<std::uintptr_t>(out.data) % static_cast<std::uintptr_t>(out.item_size) != 0)
        value_error("out: the memory is not aligned to its element type");
    const ByteRange o = byte_range(out), i = byte_range(x);
    if (o.begin < i.end && i.begin < o.end) value_error("out: overlaps x in memory");
}

Place place_of_layer(const Linear& linear) {
    const std::optional<int> device = linear.cuda_device();
    return {.cuda = device.has_value(), .index = device.value_or(0)};
}

// The shape of y and the sizes of the problem.
std::vector<std::int64_t> describe_call(const Linear& linear, const Array& x, Problem& problem) {
    problem.dtype = activation_dtype(x);
    if (x.ndim == 0 || x.shape[x.ndim - 1] != linear.in_features())
        value_error("x: expected shape [..., K] with K = " + std::to_string(linear.in_features()) + ", got " +
                    x.shape_text());
    std::vector<std::int64_t> shape(x.shape, x.shape + x.ndim);
    shape.back() = linear.out_features();
    problem.m = 1;
    for (int i = 0; i + 1 < x.ndim; ++i) problem.m *= x.shape[i];
    problem.n = linear.out_features();
    problem.k = linear.in_features();
    problem.block_size = linear.block_size();
    return shape;
}

// y: fresh, or the caller's.
struct Destination {
    std::optional<Output> fresh;
    Array out;
    void* data = nullptr;

    Destination(const Array& x, nb::handle out_object, const std::vector<std::int64_t>& shape, const Place& place,
                void* stream) {
        if (out_object.is_none()) {
            fresh.emplace(x, shape, place, stream);
            data = fresh->data();
        } else {
            out = import_array(out_object, "out", Gradient::refuse, place, stream);
            check_out(out, x, shape);
            data = const_cast<std::uint8_t*>(out.data);
        }
    }
    nb::object finish(nb::handle out_object) { return fresh ? fresh->finish() : nb::borrow(out_object); }
};

nb::object forward_cpu(const Layer& layer, nb::handle x_object, nb::handle out_object, nb::handle stream) {
    const Linear& linear = *layer.linear;
    if (!stream.is_none()) value_error("stream: the layer is on the CPU, which has none");
    const Array x = import_array(x_object, "x", Gradient::refuse_if_recording);
    Problem problem;
    const std::vector<std::int64_t> shape = describe_call(linear, x, problem);
    Destination y(x, out_object, shape, {}, nullptr);
    problem.y = y.data;
    std::optional<PathId> path;
    {
        nb::gil_scoped_release unlocked;
        std::vector<std::uint8_t> storage;
        const std::optional<std::int64_t> stride = row_stride(x);
        problem.x = stride ? x.data : x.contiguous(storage);
        problem.x_row_stride = stride ? *stride : problem.k;
        path = linear.forward(problem);
    }
    last_call = {layer.serial, path};
    return y.finish(out_object);
}

// What the GPU kernels load in one piece.
constexpr std::uintptr_t gpu_row_alignment = 16;

// x as the GPU paths read it: rows contiguous, apart and aligned. Nothing: x must be gathered first.
std::optional<std::int64_t> gpu_row_stride(const Array& x, std::int64_t m) {
    const std::optional<std::int64_t> stride = row_stride(x);
    if (!stride || reinterpret_cast<std::uintptr_t>(x.data) % gpu_row_alignment != 0) return std::nullopt;
    if (m <= 1) return stride;
    const std::int64_t k = x.shape[x.ndim - 1];
    const bool aligned = *stride * x.item_size % static_cast<std::int64_t>(gpu_row_alignment) == 0;
    if (*stride < k || (!aligned && *stride != k)) return std::nullopt;
    return stride;
}

nb::object forward_cuda(const Layer& layer, nb::handle x_object, nb::handle out_object, nb::handle stream_object) {
    const Linear& linear = *layer.linear;
    const Place place = place_of_layer(linear);
    const cuda::CurrentDevice current(place.index);
    std::optional<void*> stream = parse_stream(stream_object);
    const std::optional<void*> current_of_library =
        stream && !out_object.is_none() ? std::nullopt : current_stream(x_object, place);
    if (!stream) stream = current_of_library;
    if (!stream) stream = cuda::own_stream(place.index);
    // The library allocates y for its current stream: another stream joins that one before and after.
    const bool joined = current_of_library && *current_of_library != *stream;
    if (joined) cuda::order(*current_of_library, *stream);
    Array x = import_array(x_object, "x", Gradient::refuse_if_recording, place, *stream);
    Problem problem;
    const std::vector<std::int64_t> shape = describe_call(linear, x, problem);
    if (problem.dtype == DType::float32) type_error("x: expected float16 or bfloat16 on a GPU, got float32");
    Destination y(x, out_object, shape, place, *stream);
    problem.y = y.data;
    std::optional<PathId> path;
    {
        nb::gil_scoped_release unlocked;
        StreamMemory gathered(*stream);
        const std::optional<std::int64_t> stride = gpu_row_stride(x, problem.m);
        problem.x = x.data;
        problem.x_row_stride = stride ? *stride : problem.k;
        if (!stride && problem.m > 0 && problem.k > 0) {
            void* rows = gathered.allocate(static_cast<std::size_t>(problem.m * problem.k * x.item_size));
            cuda::gather(rows, x.data, x.ndim, x.shape, x.strides, *stream);
            problem.x = rows;
        }
        path = linear.forward(problem, *stream);
    }
    if (joined) cuda::order(*stream, *current_of_library);
    last_call = {layer.serial, path};
    if (x.library != Library::torch && x.library != Library::cupy) Retired::keep_until_reached(std::move(x), *stream);
    return y.finish(out_object);
}

nb::object forward(const Layer& layer, nb::handle x, nb::handle out, nb::handle stream) {
    return layer.linear->cuda_device() ? forward_cuda(layer, x, out, stream) : forward_cpu(layer, x, out, stream);
}

nb::object scale2_array(const Linear& linear) {
    const std::vector<float>& scale2 = linear.scale2();
    std::vector<std::int64_t> shape;
    if (scale2.size() != 1) shape.push_back(linear.out_features());
    nb::object array = numpy_empty(shape, "float32");
    std::copy(scale2.begin(), scale2.end(), static_cast<float*>(numpy_data(array)));  // may be none, at null
    return array;
}

nb::object bias_array(const Linear& linear) {
    if (linear.bias().empty()) return nb::none();
    nb::object array = numpy_empty({linear.out_features()}, "float32");
    std::memcpy(numpy_data(array), linear.bias().data(), linear.bias().size() * sizeof(float));
    return array;
}

nb::tuple canonical(const Layer& layer) {
    const Linear& linear = *layer.linear;
    nb::object b = numpy_empty({linear.out_features(), linear.in_features() / 2}, "uint8");
    nb::object scales =
        numpy_empty({linear.out_features(), blocks_per_row(linear.in_features(), linear.block_size())}, "uint8");
    auto* b_data = static_cast<std::uint8_t*>(numpy_data(b));
    auto* scales_data = static_cast<std::uint8_t*>(numpy_data(scales));
    {
        nb::gil_scoped_release unlocked;
        linear.canonical(b_data, scales_data);
    }
    return nb::make_tuple(b, scales, scale2_array(linear));
}

nb::object dequantize_layer(const Layer& layer) {
    const Linear& linear = *layer.linear;
    nb::object w = numpy_empty({linear.out_features(), linear.in_features()}, "float32");
    auto* data = static_cast<float*>(numpy_data(w));
    {
        nb::gil_scoped_release unlocked;
        linear.dequantize(data);
    }
    return w;
}

// What fp4linear.torch's gradient multiplies by: see the docstring.
void dequantize_rows(const Layer& layer, std::int64_t first, nb::handle out_object, nb::handle scale2_object) {
    const Linear& linear = *layer.linear;
    const Place place = place_of_layer(linear);
    if (!place.cuda) value_error("dequantize_rows: the layer is on the CPU");
    const cuda::CurrentDevice current(place.index);
    const std::optional<void*> stream = current_stream(out_object, place);
    if (!stream) type_error("out: expected a torch or CuPy array");
    const Array out = import_array(out_object, "out", Gradient::refuse, place, *stream);
    if (out.ndim != 2 || out.shape[1] != linear.in_features())
        value_error("out: expected shape [rows, K] with K = " + std::to_string(linear.in_features()) + ", got " +
                    out.shape_text());
    if (out.read_only || !out.is_contiguous()) value_error("out: expected a C-contiguous array that may be written");
    const DType dtype = activation_dtype(out);
    if (dtype == DType::float32) type_error("out: expected float16 or bfloat16, got float32");
    Array scale2;
    if (!scale2_object.is_none()) {
        scale2 = import_array(scale2_object, "scale2", Gradient::refuse, place, *stream);
        if (scale2.element != Element::float32 || scale2.ndim != 1 || scale2.shape[0] != out.shape[0] ||
            !scale2.is_contiguous() || scale2.read_only)
            value_error("scale2: expected a contiguous float32 array of the rows of out, got " + scale2.dtype + " " +
                        scale2.shape_text());
    }
    auto* const values = const_cast<std::uint8_t*>(out.data);
    auto* const factors = reinterpret_cast<float*>(const_cast<std::uint8_t*>(scale2.data));
    nb::gil_scoped_release unlocked;
    linear.dequantize_rows(first, out.shape[0], dtype, values, factors, *stream);
}

// Arguments that make an equal layer of the same class.
nb::tuple reduce(nb::handle self) {
    const Layer& layer = *nb::inst_ptr<Layer>(self);
    const Linear& linear = *layer.linear;
    nb::tuple weight = canonical(layer);
    const Options& options = linear.options();
    nb::dict keywords;
    keywords["block_size"] = linear.block_size();
    keywords["device"] = place_text(place_of_layer(linear));
    keywords["nan_scales"] = nan_scales_text(linear.nan_scales());
    keywords["path"] = options.path;
    keywords["batch_invariant"] = options.batch_invariant;
    keywords["native"] = options.native_nvfp4;
    if (options.input_global_scale == 0.0f) {
        keywords["input_global_scale"] = "dynamic";
    } else if (options.input_global_scale != 1.0f) {
        keywords["input_global_scale"] = options.input_global_scale;
    }
    // The instruction set and the threads belong to this machine: keep them only where they were asked for.
    keywords["isa"] = options.cpu_isa.empty() ? nb::none() : nb::cast(options.cpu_isa);
    keywords["threads"] = options.num_threads == 0 ? nb::none() : nb::cast(options.num_threads);
    nb::object rebuild = nb::module_::import_("fp4linear._rebuild").attr("rebuild");
    nb::object type = nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(self.ptr())));
    nb::object state = nb::hasattr(self, "__dict__") ? self.attr("__dict__") : nb::none();
    return nb::make_tuple(rebuild, nb::make_tuple(type, weight[0], weight[1], weight[2], bias_array(linear), keywords),
                          state);
}

std::string representation(nb::handle self) {
    const Linear& linear = *nb::inst_ptr<Layer>(self)->linear;
    std::string text = nb::cast<std::string>(nb::str(self.type().attr("__name__")));
    text += "(in_features=" + std::to_string(linear.in_features()) +
            ", out_features=" + std::to_string(linear.out_features()) +
            ", bias=" + (linear.bias().empty() ? "False" : "True") +
            ", block_size=" + std::to_string(linear.block_size()) + ", device='" + place_text(place_of_layer(linear)) +
            "'";
    if (!linear.cuda_device()) text += ", isa='" + std::string(linear.isa().name) + "'";
    if (linear.options().path != "auto") text += ", path='" + linear.options().path + "'";
    return text + ")";
}

struct PlanOfCall {
    Plan plan;
    PlanQuery query;
};

}  // namespace

void bind_plan(nb::module_& m) {
    nb::class_<PlanOfCall>(m, "Plan", "Which path runs a call, and why the rungs above it on the ladder do not.")
        .def_prop_ro(
            "path",
            [](const PlanOfCall& p) -> nb::object {
                return p.plan.found ? nb::cast(std::string(p.plan.name())) : nb::none();
            },
            nb::sig("def path(self) -> str | None"),
            "Name of the path; 'none' where there is nothing to compute, None where no path can run.")
        .def_prop_ro(
            "reasons",
            [](const PlanOfCall& p) {
                nb::dict reasons;
                for (const Rejection& r : p.plan.rejected) reasons[nb::cast(std::string(name_of(r.path)))] = r.reason;
                return reasons;
            },
            nb::sig("def reasons(self) -> dict[str, str]"), "Rung to the condition that it does not meet, in order.")
        .def_prop_ro(
            "details", [](const PlanOfCall& p) { return describe(p.plan, p.query); },
            "The whole plan in words, a line a rung.")
        .def_prop_ro(
            "rows_per_block", [](const PlanOfCall& p) { return p.plan.rows_per_block; },
            "Rows of x that share a weight load (gemv_scalar), else 0.")
        .def("__str__", [](const PlanOfCall& p) { return describe(p.plan, p.query); })
        .def("__repr__", [](const PlanOfCall& p) { return "<Plan " + std::string(p.plan.name()) + ">"; });
}

nb::object plan_object(const Plan& plan, const PlanQuery& query) { return nb::cast(PlanOfCall{plan, query}); }

void bind_linear(nb::module_& m) {
    nb::class_<Layer>(
        m, "Fp4Linear", nb::dynamic_attr(), nb::is_weak_referenceable(),
        "A linear layer whose weight is stored as NVFP4: y = x @ W.T + bias, "
        "W[n, k] = e2m1(b[n, k]) * e4m3(scales[n, k // block_size]) * scale2.\n\n"
        "The result is rounded once, from an fp32 sum to the type of x, on every path and shape.\n"
        "The arguments are copied: the layer holds its own form of the weight, on its device, and borrows\n"
        "nothing.\n"
        "A layer never changes after construction; any thread may call it. It can be pickled and copied.\n"
        "E2M1 is that of OCP Microscaling Formats v1.0, E4M3 that of OCP 8-bit Floating Point.\n\n"
        "Args:\n"
        "    b: [N, K/2] uint8 (int8 and the frameworks' float4_e2m1 types too), two E2M1 codes a byte,\n"
        "        the even k in the low nibble.\n"
        "    scales: [N, ceil(K/block_size)] uint8 or float8_e4m3fn, row-major E4M3 bytes.\n"
        "    scale2: global scale that multiplies: a number, an array of one element, or [N] (one a row).\n"
        "    bias: [N] float16, bfloat16 or float32, or None.\n"
        "    block_size: values of K that share a scale; the last block of a row may be short.\n"
        "    device: 'cpu', 'cuda:N', None for where b lives, or 'cuda': the GPU where b lives, else the current one\n"
        "        of torch or CuPy, where neither is in use the first.\n"
        "    nan_scales: 'error' refuses NaN scale bytes, 'zero' reads such a block as zero,\n"
        "        'propagate' follows IEEE.\n"
        "    path: 'auto' for the ladder, or the name of the path that must run.\n"
        "    isa: CPU instruction set (see fp4linear info), or None for the best.\n"
        "    threads: threads of a CPU call, or None for FP4LINEAR_NUM_THREADS, else every core.\n"
        "    batch_invariant: a row's result has the same bits whatever M and the other rows are.\n"
        "    native: True lets the ladder take native_nvfp4, which rounds x to 4 bits, where it can run (Blackwell,\n"
        "        M > 8); None is FP4LINEAR_NATIVE_NVFP4.\n"
        "    input_scale, input_global_scale: the global scale of x, at most one of both; only the native paths, "
        "which\n"
        "        quantise x, use it. input_scale divides x (ModelOpt: amax / 2688), input_global_scale multiplies it\n"
        "        (2688 / amax); input_global_scale='dynamic' takes it from the x of each call. By default 1.\n\n"
        "Raises:\n"
        "    TypeError: an argument of a type that is not listed.\n"
        "    ValueError: a shape that does not fit, NaN scales, a scale2 that is not finite.\n\n"
        "Example:\n"
        "    >>> import numpy as np, fp4linear\n"
        "    >>> b = np.array([[0x22, 0x22], [0x44, 0xCC]], np.uint8)  # rows of W / scale: 1 1 1 1 and 2 2 -2 -2\n"
        "    >>> scales = np.array([[0x38], [0x40]], np.uint8)  # 1 and 2\n"
        "    >>> layer = fp4linear.Fp4Linear(b, scales, 0.5, bias=np.array([0, 100], np.float32))\n"
        "    >>> layer(np.array([1, 2, 3, 4], np.float16))\n"
        "    array([ 5., 92.], dtype=float16)")
        .def(
            "__init__",
            [](Layer* self, nb::handle b, nb::handle scales, nb::handle scale2, nb::handle bias, int block_size,
               const std::optional<std::string>& device, const std::string& nan_scales, const std::string& path,
               const std::optional<std::string>& isa, const std::optional<int>& threads, bool batch_invariant,
               const std::optional<bool>& native, nb::handle input_scale, nb::handle input_global_scale) {
                new (self) Layer(make_layer(b, scales, scale2, bias, block_size, device, nan_scales, path, isa, threads,
                                            batch_invariant, native, input_scale, input_global_scale));
            },
            nb::arg("b"), nb::arg("scales"), nb::arg("scale2").none(), nb::arg("bias").none() = nb::none(),
            nb::kw_only(), nb::arg("block_size") = 16, nb::arg("device").none() = nb::none(),
            nb::arg("nan_scales") = "error", nb::arg("path") = "auto", nb::arg("isa").none() = nb::none(),
            nb::arg("threads").none() = nb::none(), nb::arg("batch_invariant") = false,
            nb::arg("native").none() = nb::none(), nb::arg("input_scale").none() = nb::none(),
            nb::arg("input_global_scale").none() = nb::none(),
            nb::sig(
                "def __init__(self, b: typing.Any, scales: typing.Any, scale2: typing.Any, bias: typing.Any = None, "
                "*, block_size: int = 16, device: str | None = None, nan_scales: str = 'error', path: str = 'auto', "
                "isa: str | None = None, threads: int | None = None, batch_invariant: bool = False, "
                "native: bool | None = None, input_scale: typing.Any = None, input_global_scale: typing.Any = None) -> "
                "None"))
        .def(
            "forward", forward, nb::arg("x"), nb::kw_only(), nb::arg("out").none() = nb::none(),
            nb::arg("stream").none() = nb::none(),
            nb::sig(
                "def forward(self, x: _ArrayT, *, out: _ArrayT | None = None, stream: typing.Any = None) -> _ArrayT"),
            "y = x @ W.T + bias, rounded once to x's type.\n\n"
            "Args:\n"
            "    x: [..., K] float16, bfloat16 or float32, of NumPy, torch, JAX or any DLPack producer; any strides.\n"
            "        Leading axes flatten to M; a 1-D x gives a 1-D y.\n"
            "    out: C-contiguous array [..., N] of x's type to write to; it may not overlap x.\n"
            "    stream: on a GPU, the stream to work on: a cudaStream_t as int, or an object with __cuda_stream__.\n"
            "        By default torch's or CuPy's current stream; for other libraries one of this library's own,\n"
            "        ordered behind the producer of x and before the consumer of y. Where it is given without out=,\n"
            "        it is joined with torch's or CuPy's current stream before and after; with out=, ordering is the\n"
            "        caller's part.\n\n"
            "Returns:\n"
            "    y [..., N] of x's library, type and device: a fresh C-contiguous array, or `out`.\n\n"
            "Raises:\n"
            "    TypeError, ValueError, BufferError: naming the argument, what it is and what was expected. The layer\n"
            "        stays usable.")
        .def("__call__", forward, nb::arg("x"), nb::kw_only(), nb::arg("out").none() = nb::none(),
             nb::arg("stream").none() = nb::none(),
             nb::sig(
                 "def __call__(self, x: _ArrayT, *, out: _ArrayT | None = None, stream: typing.Any = None) -> _ArrayT"),
             "Same as forward().")
        .def(
            "plan",
            [](const Layer& layer, std::int64_t rows, const std::string& dtype) {
                if (rows < 0) value_error("M: expected a number >= 0, got " + std::to_string(rows));
                const DType t = parse_dtype(dtype);
                return PlanOfCall{layer.linear->plan(rows, t),
                                  {.m = rows,
                                   .n = layer.linear->out_features(),
                                   .k = layer.linear->in_features(),
                                   .block_size = layer.linear->block_size(),
                                   .dtype = t}};
            },
            nb::arg("M"), nb::arg("dtype") = "bfloat16",
            "The path that a call takes, with the reasons; nothing is run.\n\n"
            "Args:\n"
            "    M: rows of x, the product of its leading axes.\n"
            "    dtype: 'float16', 'bfloat16' or 'float32', the type of x.\n\n"
            "Raises:\n"
            "    ValueError: an unknown dtype, or M < 0.")
        .def(
            "canonical", canonical,
            nb::sig("def canonical(self) -> tuple[numpy.typing.NDArray[numpy.uint8], "
                    "numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.float32]]"),
            "(b, scales, scale2) as given at construction, bit for bit: uint8 [N, K/2], uint8 [N, ceil(K/block_size)], "
            "float32 0-d or [N].")
        .def("dequantize", dequantize_layer, nb::sig("def dequantize(self) -> numpy.typing.NDArray[numpy.float32]"),
             "The weight as float32 [N, K]: e2m1 * e4m3 * scale2, rounded once.")
        .def_prop_ro(
            "in_features", [](const Layer& l) { return l.linear->in_features(); }, "Length of x's last axis, K.")
        .def_prop_ro(
            "out_features", [](const Layer& l) { return l.linear->out_features(); }, "Length of y's last axis, N.")
        .def_prop_ro(
            "block_size", [](const Layer& l) { return l.linear->block_size(); }, "Values of K that share a scale.")
        .def_prop_ro(
            "nbytes", [](const Layer& l) { return l.linear->nbytes(); },
            "Bytes that the layer holds, of weight, scales, factors and bias.")
        .def_prop_ro(
            "device", [](const Layer& l) { return place_text(place_of_layer(*l.linear)); },
            "Where the weight is, 'cpu' or 'cuda:N'.")
        .def_prop_ro(
            "isa", [](const Layer& l) { return std::string(l.linear->isa().name); },
            "The CPU instruction set that the layer's calls use.")
        .def_prop_ro(
            "scale2", [](const Layer& l) { return scale2_array(*l.linear); },
            nb::sig("def scale2(self) -> numpy.typing.NDArray[numpy.float32]"), "Global scale, float32 0-d or [N].")
        .def_prop_ro(
            "input_global_scale",
            [](const Layer& l) -> nb::object {
                const float g = l.linear->options().input_global_scale;
                return g == 0.0f ? nb::cast("dynamic") : nb::cast(g);
            },
            nb::sig("def input_global_scale(self) -> float | str"),
            "What the native paths multiply x by before they quantise it, or 'dynamic'.")
        .def_prop_ro(
            "bias", [](const Layer& l) { return bias_array(*l.linear); },
            nb::sig("def bias(self) -> numpy.typing.NDArray[numpy.float32] | None"), "float32 [N], or None.")
        .def_prop_ro(
            "last_path",
            [](const Layer& l) -> nb::object {
                if (last_call.serial != l.serial || !last_call.path) return nb::none();
                return nb::cast(std::string(name_of(*last_call.path)));
            },
            nb::sig("def last_path(self) -> str | None"),
            "The path that the calling thread's last call ran, or None where that was another layer's or an empty one.")
        .def("__reduce__", reduce, nb::sig("def __reduce__(self) -> tuple[typing.Any, ...]"))
        .def("__repr__", representation);
    m.def("dequantize", dequantize_arrays, nb::arg("b"), nb::arg("scales"), nb::arg("scale2").none(),
          nb::arg("block_size"),
          nb::sig("def dequantize(b: typing.Any, scales: typing.Any, scale2: typing.Any, block_size: int) -> "
                  "numpy.typing.NDArray[numpy.float32]"),
          "float32 [N, K] of canonical arrays.");
    m.def("dequantize_rows", dequantize_rows, nb::arg("layer"), nb::arg("first"), nb::arg("out"),
          nb::arg("scale2").none() = nb::none(),
          nb::sig("def dequantize_rows(layer: Fp4Linear, first: int, out: typing.Any, scale2: typing.Any = None) -> "
                  "None"),
          "Writes e2m1 * e4m3 of rows [first, first + R) of a layer on a GPU to out [R, K], a torch or CuPy array of "
          "float16 or bfloat16 there (exact: the global scale is left out), and where the layer has a global scale a "
          "row, theirs to scale2 (float32 [R]). On the library's current stream; may be captured.");
}

}  // namespace fp4linear::python
