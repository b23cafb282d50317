// The free functions of fp4linear._core: formats, the planner for any device, and what this build and machine are.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstring>

#include "array.h"
#include "bindings.h"
#include "cpu/bandwidth.h"
#include "cpu/cpu.h"
#include "cuda/backend.h"
#include "formats/swizzle.h"
#include "linear.h"
#include "quantize.h"

namespace fp4linear::python {
namespace {

QuantizeMethod parse_method(const std::string& text) {
    if (text == "max_abs") return QuantizeMethod::max_abs;
    if (text == "four_over_six") return QuantizeMethod::four_over_six;
    if (text == "mse") return QuantizeMethod::mse;
    value_error("method: expected 'max_abs', 'four_over_six' or 'mse', got '" + text + "'");
}

nb::tuple quantize_matrix(nb::handle w, const std::string& method_name, const std::optional<double>& scale2) {
    const QuantizeMethod method = parse_method(method_name);
    const Array array = import_array(on_host(w), "w", Gradient::ignore);
    if (!is_float(array.element)) type_error("w: expected a float array, got " + array.dtype);
    if (array.ndim != 2) value_error("w: expected shape [N, K], got " + array.shape_text());
    const std::int64_t n = array.shape[0], k = array.shape[1];
    if (k % 2 != 0) value_error("w: K must be even (two codes a byte), got shape " + array.shape_text());
    const std::vector<float> matrix = to_floats(array);
    std::int64_t bad = 0, first = -1;
    float amax = 0.0f;
    for (std::int64_t i = 0; i < n * k; ++i) {
        if (!std::isfinite(matrix[static_cast<std::size_t>(i)])) {
            if (bad++ == 0) first = i;
            continue;
        }
        amax = std::max(amax, std::fabs(matrix[static_cast<std::size_t>(i)]));
    }
    if (bad > 0)
        value_error("w: " + std::to_string(bad) + " value(s) are not finite in float32, the first at [" +
                    std::to_string(first / k) + ", " + std::to_string(first % k) + "]");
    float global = global_scale(amax, method);
    if (scale2) {
        global = static_cast<float>(*scale2);
        if (!(global > 0.0f) || !std::isfinite(global))
            value_error("scale2: expected a finite number > 0, got " + std::to_string(*scale2));
    }
    nb::object b = numpy_empty({n, k / 2}, "uint8");
    nb::object scales = numpy_empty({n, blocks_per_row(k, 16)}, "uint8");
    auto* b_data = static_cast<std::uint8_t*>(numpy_data(b));
    auto* scales_data = static_cast<std::uint8_t*>(numpy_data(scales));
    {
        nb::gil_scoped_release unlocked;
        quantize(n, k, matrix.data(), method, global, b_data, scales_data);
    }
    nb::object scale2_array = numpy_empty({}, "float32");
    std::memcpy(numpy_data(scale2_array), &global, sizeof global);
    return nb::make_tuple(b, scales, scale2_array);
}

struct ScaleMatrix {
    Array array;
    std::vector<std::uint8_t> storage;
    const std::uint8_t* data = nullptr;
};

void import_scales(ScaleMatrix& m, nb::handle object) {
    m.array = import_array(object, "scales", Gradient::ignore);
    if (m.array.element != Element::uint8 && m.array.element != Element::float8_e4m3fn)
        type_error("scales: expected uint8 or float8_e4m3fn, got " + m.array.dtype);
    m.data = m.array.contiguous(m.storage);
}

nb::object swizzle_scales(nb::handle scales) {
    ScaleMatrix plain;
    import_scales(plain, scales);
    if (plain.array.ndim != 2) value_error("scales: expected shape [N, C], got " + plain.array.shape_text());
    const std::int64_t rows = plain.array.shape[0], blocks = plain.array.shape[1];
    nb::object out = numpy_empty({swizzle::padded_rows(rows), swizzle::padded_blocks(blocks)}, "uint8");
    swizzle::from_plain(plain.data, rows, blocks, static_cast<std::uint8_t*>(numpy_data(out)));
    return out;
}

nb::object unswizzle_scales(nb::handle scales, std::int64_t rows, std::int64_t blocks) {
    ScaleMatrix swizzled;
    import_scales(swizzled, scales);
    if (rows < 0 || blocks < 0) value_error("N and C must be >= 0");
    if (swizzled.array.size() != swizzle::size(rows, blocks))
        value_error("scales: expected " + std::to_string(swizzle::size(rows, blocks)) + " bytes for [" +
                    std::to_string(rows) + ", " + std::to_string(blocks) + "], got shape " +
                    swizzled.array.shape_text());
    nb::object out = numpy_empty({rows, blocks}, "uint8");
    swizzle::to_plain(swizzled.data, rows, blocks, static_cast<std::uint8_t*>(numpy_data(out)));
    return out;
}

// A number, or an array of one element.
float positive_number(nb::handle object, const char* name, const char* takes) {
    const std::string expected = std::string(name) + ": expected " + takes;
    PyObject* p = object.ptr();
    if (PyBool_Check(p) || PyUnicode_Check(p)) {
        const std::string got = nb::cast<std::string>(nb::repr(object));
        if (PyBool_Check(p)) type_error(expected + ", got " + got);
        value_error(expected + ", got " + got);
    }
    double value = 0.0;
    if (nb::hasattr(object, "shape") && nb::len(nb::object(object.attr("shape"))) > 0) {
        const Array a = import_array(on_host(object), name, Gradient::ignore);
        if (!is_float(a.element)) type_error(expected + ", got " + a.dtype);
        if (a.size() != 1) value_error(expected + ", got shape " + a.shape_text());
        value = static_cast<double>(to_floats(a)[0]);
    } else {
        value = PyFloat_AsDouble(p);
        if (value == -1.0 && PyErr_Occurred() != nullptr) {
            nb::python_error error;
            if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_OverflowError)) throw error;
            const std::string got = nb::cast<std::string>(nb::str(object.type().attr("__name__")));
            if (error.matches(PyExc_TypeError)) type_error(expected + ", got " + got);
            value_error(expected + ", got an integer beyond float32");
        }
    }
    const auto number = static_cast<float>(value);
    if (!(number > 0.0f) || !std::isfinite(number))
        value_error(expected + ", finite and > 0 in float32, got " + std::to_string(value));
    return number;
}

// "cpu", or "sm90": a device that need not be here.
DeviceSpec parse_device_spec(const std::string& text) {
    DeviceSpec spec;
    spec.kernels = (std::uint32_t{1} << path_count) - 1;
    if (text == "cpu") return spec;
    if (text.rfind("sm", 0) == 0 && text.size() >= 4 && text.find_first_not_of("0123456789", 2) == std::string::npos) {
        spec.kind = DeviceKind::cuda;
        spec.sm = std::stoi(text.substr(2));
        return spec;
    }
    value_error("device: expected 'cpu' or 'smNN', got '" + text + "'");
}

nb::object plan_for(std::int64_t n, std::int64_t k, std::int64_t m, const std::string& dtype, int block_size,
                    const std::string& device, int sm_count, const std::string& path, bool native,
                    bool gemv_tensor_core, bool gemv_row_tiling, std::int64_t gemv_max_m, bool batch_invariant,
                    bool cublaslt, std::int64_t cpu_gemv_max_m,
                    const std::optional<std::vector<std::string>>& kernels) {
    DeviceSpec spec = parse_device_spec(device);
    spec.sm_count = sm_count;
    spec.cublaslt = cublaslt;
    spec.cublaslt_reason = "not found";
    spec.cpu_gemv_max_m = cpu_gemv_max_m;
    if (kernels) {
        spec.kernels = 0;
        for (const std::string& name : *kernels) {
            const Path* p = find_path(name);
            if (p == nullptr) value_error("kernels: expected names among " + path_names() + ", got '" + name + "'");
            spec.kernels |= path_bit(p->id);
        }
    }
    Options options;
    options.path = path;
    options.native_nvfp4 = native;
    options.gemv_tensor_core = gemv_tensor_core;
    options.gemv_row_tiling = gemv_row_tiling;
    options.gemv_max_m = gemv_max_m;
    options.batch_invariant = batch_invariant;
    if (n < 0 || k < 0 || m < 0 || block_size < 1) value_error("n, k and m must be >= 0 and block_size >= 1");
    const PlanQuery query{.m = m, .n = n, .k = k, .block_size = block_size, .dtype = parse_dtype(dtype)};
    return plan_object(make_plan(query, spec, options), query);
}

nb::list isas() {
    nb::list list;
    for (const cpu::Isa& isa : cpu::all_isas()) {
        nb::dict entry;
        entry["name"] = nb::cast(std::string(isa.name));
        entry["runs_here"] = isa.runs_here();
        entry["selected"] = &isa == &cpu::best_isa();
        list.append(entry);
    }
    return list;
}

nb::dict native_kernels(int sm, std::int64_t n, std::int64_t k, std::int64_t m, const std::string& dtype) {
    if (n < 1 || k < 1 || m < 1) value_error("n, k and m must be >= 1");
    const cuda::NativeCheck check = cuda::check_native(sm, m, n, k, parse_dtype(dtype));
    nb::dict found;
    found["built"] = check.built;
    found["reason"] = check.reason;
    found["tile"] = nb::make_tuple(check.tile_m, check.tile_n, check.tile_k);
    found["cluster"] = check.cluster_m;
    found["workspace"] = check.workspace;
    return found;
}

nb::dict cuda_info() {
    nb::dict info;
    info["built"] = cuda::built();
    info["build_info"] = cuda::build_info();
    info["architectures"] = cuda::architectures();
    nb::list devices;
    const int count = cuda::device_count();
    for (int i = 0; i < count; ++i) {
        const cuda::DeviceInfo d = cuda::device_info(i);
        nb::dict entry;
        entry["index"] = i;
        entry["name"] = d.name;
        entry["sm"] = d.sm;
        entry["sm_count"] = d.sm_count;
        entry["memory"] = d.memory;
        devices.append(entry);
    }
    info["devices"] = devices;
    info["reason"] = count == 0 ? nb::cast(cuda::no_device_reason()) : nb::none();
    return info;
}

nb::list environment() {
    nb::list table;
    for (const Switch& s : environment_table()) {
        nb::dict entry;
        entry["name"] = s.name;
        entry["value"] = s.value;
        entry["takes"] = s.takes;
        entry["meaning"] = s.meaning;
        table.append(entry);
    }
    return table;
}

nb::object cuda_dequantize(nb::handle b, nb::handle scales, double scale2, int block_size, int device) {
    const Array codes = import_array(b, "b", Gradient::ignore);
    ScaleMatrix s;
    import_scales(s, scales);
    if (codes.element != Element::uint8 || codes.ndim != 2 || s.array.ndim != 2)
        value_error("b, scales: expected 2-D uint8");
    const std::int64_t n = codes.shape[0], k = 2 * codes.shape[1];
    if (block_size < 1 || s.array.shape[0] != n || s.array.shape[1] != blocks_per_row(k, block_size))
        value_error("scales: got shape " + s.array.shape_text() + " for b of shape " + codes.shape_text());
    std::vector<std::uint8_t> storage;
    const auto factor = static_cast<float>(scale2);
    nb::object out = numpy_empty({n, k}, "float32");
    cuda::DequantizeArguments weight;
    weight.n = n;
    weight.k = k;
    weight.block_size = block_size;
    weight.b = codes.contiguous(storage);
    weight.scales = s.data;
    weight.scale2 = &factor;
    cuda::dequantize_host(weight, DType::float32, numpy_data(out), device);
    return out;
}

}  // namespace

float parse_input_scales(nb::handle input_scale, nb::handle global_scale, const char* name) {
    if (input_scale.is_none() && global_scale.is_none()) return 1.0f;
    if (!input_scale.is_none() && !global_scale.is_none())
        value_error(std::string("input_scale and ") + name + ": expected at most one of both; each is 1 / the other");
    if (!input_scale.is_none()) {
        const float reciprocal = 1.0f / positive_number(input_scale, "input_scale", "a number (amax / 2688)");
        if (!std::isfinite(reciprocal)) value_error("input_scale: 1 / input_scale is beyond float32");
        return reciprocal;
    }
    if (PyUnicode_Check(global_scale.ptr()) && nb::cast<std::string>(global_scale) == "dynamic") return 0.0f;
    return positive_number(global_scale, name, "a number (2688 / amax) or 'dynamic'");
}

std::string cuda_unavailable_reason() {
    if (!cuda::built()) return cuda::build_info();
    if (cuda::device_count() == 0) return cuda::no_device_reason();
    return "";
}

void bind_functions(nb::module_& m) {
    m.def("quantize", quantize_matrix, nb::arg("w"), nb::arg("method"), nb::arg("scale2").none(),
          nb::sig("def quantize(w: typing.Any, method: str, scale2: float | None) -> "
                  "tuple[numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.uint8], "
                  "numpy.typing.NDArray[numpy.float32]]"),
          "(b, scales, scale2) of a float matrix [N, K].");
    m.def(
        "swizzle_scales", swizzle_scales, nb::arg("scales"),
        nb::sig("def swizzle_scales(scales: typing.Any) -> numpy.typing.NDArray[numpy.uint8]"),
        "Plain E4M3 scales [N, C] to the 128x4 layout [roundup(N, 128), roundup(C, 4)] of docs/layouts.md; padding is "
        "zero. TypeError for other types than uint8 and float8_e4m3fn, ValueError for other shapes.");
    m.def("unswizzle_scales", unswizzle_scales, nb::arg("scales"), nb::arg("N"), nb::arg("C"),
          nb::sig("def unswizzle_scales(scales: typing.Any, N: int, C: int) -> numpy.typing.NDArray[numpy.uint8]"),
          "The 128x4 layout back to plain scales uint8 [N, C]. Errors are those of swizzle_scales.");
    m.def("plan", plan_for, nb::arg("n"), nb::arg("k"), nb::arg("m"), nb::kw_only(), nb::arg("dtype") = "bfloat16",
          nb::arg("block_size") = 16, nb::arg("device") = "cpu", nb::arg("sm_count") = 132, nb::arg("path") = "auto",
          nb::arg("native") = false, nb::arg("gemv_tensor_core") = true, nb::arg("gemv_row_tiling") = true,
          nb::arg("gemv_max_m") = -1, nb::arg("batch_invariant") = false, nb::arg("cublaslt") = true,
          nb::arg("cpu_gemv_max_m") = 16, nb::arg("kernels").none() = nb::none(),
          nb::sig(
              "def plan(n: int, k: int, m: int, *, dtype: str = 'bfloat16', block_size: int = 16, device: str = 'cpu', "
              "sm_count: int = 132, path: str = 'auto', native: bool = False, gemv_tensor_core: bool = True, "
              "gemv_row_tiling: bool = True, gemv_max_m: int = -1, batch_invariant: bool = False, "
              "cublaslt: bool = True, cpu_gemv_max_m: int = 16, kernels: typing.Sequence[str] | None = None) -> Plan"),
          "The plan of a call of m rows of x by a layer [n, k] on any device ('cpu', or 'sm90' and the like), here or "
          "not, in a build that holds the kernels of the named paths (None: of all). ValueError for unknown names and "
          "negative sizes.");
    m.def("isas", isas, nb::sig("def isas() -> list[dict[str, typing.Any]]"),
          "CPU instruction sets, best first: name, runs_here, selected.");
    m.def("native_kernels", native_kernels, nb::arg("sm"), nb::arg("n"), nb::arg("k"), nb::arg("m"),
          nb::arg("dtype") = "bfloat16",
          nb::sig("def native_kernels(sm: int, n: int, k: int, m: int, dtype: str = 'bfloat16') -> "
                  "dict[str, typing.Any]"),
          "What this build has for native_nvfp4 on a GPU of compute capability sm (120, 100, ...), as CUTLASS answers "
          "on the host: built, reason (why not, or why it can't take the shape), tile (M, N, K), cluster, workspace "
          "in bytes.");
    m.def("cuda_info", cuda_info, nb::sig("def cuda_info() -> dict[str, typing.Any]"),
          "What this build holds for CUDA and which devices it can use; makes no CUDA context.");
    m.def("environment", environment, nb::sig("def environment() -> list[dict[str, str]]"),
          "The FP4LINEAR_* switches as in force: name, value, takes, meaning. ValueError for a malformed one.");
    m.def(
        "read_bandwidth",
        [](std::size_t bytes, int threads, int repeats) {
            nb::gil_scoped_release unlocked;
            return cpu::read_bandwidth(bytes, threads, repeats);
        },
        nb::arg("bytes"), nb::arg("threads"), nb::arg("repeats"),
        "Bytes a second that the threads read from a buffer of this size: the median of the repeats.");
    m.def("default_threads", [] { return cpu::default_threads(); }, "Threads of a CPU call that asks for none.");
    m.def(
        "last_isa", [] { return std::string(cpu::last_isa_run()); },
        "The instruction set whose kernel ran last in this process, said by the kernel itself; '' before any.");
    m.def("cuda_dequantize", cuda_dequantize, nb::arg("b"), nb::arg("scales"), nb::arg("scale2"),
          nb::arg("block_size") = 16, nb::arg("device") = 0,
          nb::sig("def cuda_dequantize(b: typing.Any, scales: typing.Any, scale2: float, block_size: int = 16, "
                  "device: int = 0) -> numpy.typing.NDArray[numpy.float32]"),
          "Host arrays dequantised on a GPU; for tests of the CUDA build.");
}

}  // namespace fp4linear::python
