// fp4linear._core.quantize_activations: on the host for host arrays, on a GPU for the arrays there.
#include <nanobind/nanobind.h>

#include <cstring>
#include <memory>
#include <optional>

#include "array.h"
#include "bindings.h"
#include "cpu/cpu.h"
#include "cpu/native.h"
#include "cuda/backend.h"
#include "cuda/weight.h"
#include "device_call.h"
#include "formats/activation.h"
#include "formats/swizzle.h"
#include "problem.h"

namespace fp4linear::python {
namespace {

constexpr int block_size = activation::block_size;

// The sizes of x and of what it becomes.
struct Shapes {
    Problem problem;  // m, k and dtype
    std::vector<std::int64_t> codes, scales;

    Shapes(const Array& x, bool swizzled) {
        if (x.element == Element::float16) {
            problem.dtype = DType::float16;
        } else if (x.element == Element::bfloat16) {
            problem.dtype = DType::bfloat16;
        } else if (x.element == Element::float32) {
            problem.dtype = DType::float32;
        } else {
            type_error("x: expected float16, bfloat16 or float32, got " + x.dtype);
        }
        if (x.ndim == 0) value_error("x: expected shape [..., K], got " + x.shape_text());
        codes.assign(x.shape, x.shape + x.ndim);
        problem.k = codes.back();
        if (problem.k % 2 != 0) value_error("x: K must be even (two codes a byte), got shape " + x.shape_text());
        problem.m = 1;
        for (int i = 0; i + 1 < x.ndim; ++i) problem.m *= x.shape[i];
        const std::int64_t blocks = blocks_per_row(problem.k, block_size);
        scales = codes;
        scales.back() = blocks;
        if (swizzled) scales = {swizzle::padded_rows(problem.m), swizzle::padded_blocks(blocks)};
        codes.back() = problem.k / 2;
    }
};

nb::tuple quantize_on_host(nb::handle x, float g, ScaleLayout layout) {
    const Array array = import_array(on_host(x), "x", Gradient::ignore);
    Shapes shapes(array, layout == ScaleLayout::swizzled);
    Problem& problem = shapes.problem;
    std::vector<std::uint8_t> storage;
    problem.x = array.contiguous(storage);
    problem.x_row_stride = problem.k;
    nb::object codes = numpy_empty(shapes.codes, "uint8");
    nb::object scales = numpy_empty(shapes.scales, "uint8");
    auto* codes_data = static_cast<std::uint8_t*>(numpy_data(codes));
    auto* scales_data = static_cast<std::uint8_t*>(numpy_data(scales));
    {
        nb::gil_scoped_release unlocked;
        const int threads = cpu::default_threads();
        if (g == 0.0f) g = cpu::dynamic_global_scale(problem, threads);
        cpu::quantize_activations(problem, g, layout, threads, codes_data, scales_data);
    }
    nb::object g_array = numpy_empty({}, "float32");
    std::memcpy(numpy_data(g_array), &g, sizeof g);
    return nb::make_tuple(codes, scales, g_array);
}

// x's elements as 16-bit ones, which the copy of strided arrays moves: a float32 is two of them.
struct Halves {
    int ndim;
    std::int64_t shape[max_ndim], strides[max_ndim];

    explicit Halves(const Array& x) : ndim(x.ndim) {
        constexpr std::int64_t half = 2;
        std::copy_n(x.shape, ndim, shape);
        std::copy_n(x.strides, ndim, strides);
        if (x.item_size == half) return;
        if (ndim == max_ndim) value_error("x: at most 7 dimensions where its float32 rows are not contiguous");
        shape[ndim] = x.item_size / half;
        strides[ndim++] = half;
    }
};

nb::tuple quantize_on_device(nb::handle x_object, float g, ScaleLayout layout, nb::handle stream_object,
                             const Place& place) {
    const cuda::CurrentDevice current(place.index);
    std::optional<void*> stream = parse_stream(stream_object);
    const std::optional<void*> current_of_library = current_stream(x_object, place);
    if (!stream) stream = current_of_library;
    if (!stream) stream = cuda::own_stream(place.index);
    // As forward() does: the library allocates for its current stream, and another one joins that before and after.
    const bool joined = current_of_library && *current_of_library != *stream;
    if (joined) cuda::order(*current_of_library, *stream);
    Array x = import_array(x_object, "x", Gradient::ignore, place, *stream);
    Shapes shapes(x, layout == ScaleLayout::swizzled);
    Problem& problem = shapes.problem;
    const std::optional<std::int64_t> stride = row_stride(x);
    const std::optional<Halves> strided = stride ? std::nullopt : std::optional<Halves>(x);
    Output codes(x, Element::uint8, shapes.codes, place, *stream);
    Output scales(x, Element::uint8, shapes.scales, place, *stream);
    Output global(x, Element::float32, {}, place, *stream);
    {
        nb::gil_scoped_release unlocked;
        StreamMemory gathered(*stream);
        problem.x = x.data;
        problem.x_row_stride = stride ? *stride : problem.k;
        if (strided && problem.m > 0 && problem.k > 0) {
            void* rows = gathered.allocate(static_cast<std::size_t>(problem.m * problem.k * x.item_size));
            cuda::gather(rows, x.data, strided->ndim, strided->shape, strided->strides, *stream);
            problem.x = rows;
        }
        cuda::quantize_activations(problem, g, layout, static_cast<std::uint8_t*>(codes.data()),
                                   static_cast<std::uint8_t*>(scales.data()), static_cast<float*>(global.data()),
                                   *stream);
    }
    if (joined) cuda::order(*stream, *current_of_library);
    if (x.library != Library::torch && x.library != Library::cupy) Retired::keep_until_reached(std::move(x), *stream);
    return nb::make_tuple(codes.finish(), scales.finish(), global.finish());
}

nb::tuple quantize_activations_array(nb::handle x, nb::handle global_scale, nb::handle input_scale, bool swizzled,
                                     nb::handle stream) {
    const float g = parse_input_scales(input_scale, global_scale, "global_scale");
    const ScaleLayout layout = swizzled ? ScaleLayout::swizzled : ScaleLayout::plain;
    const Place place = place_of(x);
    // A build without CUDA takes arrays of a GPU through the host.
    if (place.cuda && cuda::built()) return quantize_on_device(x, g, layout, stream, place);
    if (!stream.is_none()) value_error("stream: x is quantised on the CPU, which has none");
    return quantize_on_host(x, g, layout);
}

}  // namespace

void bind_activations(nb::module_& m) {
    m.def("quantize_activations", quantize_activations_array, nb::arg("x"), nb::arg("global_scale").none(),
          nb::arg("input_scale").none(), nb::arg("swizzled"), nb::arg("stream").none() = nb::none(),
          nb::sig("def quantize_activations(x: typing.Any, global_scale: typing.Any, input_scale: typing.Any, "
                  "swizzled: bool, stream: typing.Any = None) -> tuple[typing.Any, typing.Any, typing.Any]"),
          "(codes, scales, global scale) of activations [..., K]: NumPy arrays, or on a GPU arrays of x's library.");
}

}  // namespace fp4linear::python
