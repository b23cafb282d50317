// fp4linear._core.native_weight: what native_nvfp4 reads of a weight, from the host or a GPU, to compare and to look
// at.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <optional>

#include "array.h"
#include "bindings.h"
#include "cuda/weight.h"
#include "formats/native_weight.h"
#include "formats/swizzle.h"

namespace fp4linear::python {
namespace {

nb::tuple make_native_weight(nb::handle b_object, nb::handle scales_object, std::optional<int> device, bool prepacked) {
    const Array b = import_array(b_object, "b", Gradient::ignore);
    const Array scales = import_array(scales_object, "scales", Gradient::ignore);
    if (b.element != Element::uint8 || scales.element != Element::uint8 || b.ndim != 2 || scales.ndim != 2)
        value_error("b, scales: expected 2-D uint8");
    const std::int64_t n = b.shape[0], k = 2 * b.shape[1], blocks = native_weight::row_blocks(k);
    if (n < 1 || k < 1 || scales.shape[0] != n || scales.shape[1] != blocks)
        value_error("scales: got shape " + scales.shape_text() + " for b of shape " + b.shape_text());
    std::vector<std::uint8_t> b_storage, scales_storage;
    const std::uint8_t* const from_b = b.contiguous(b_storage);
    const std::uint8_t* const from_scales = scales.contiguous(scales_storage);
    nb::object codes = numpy_empty({n, k / 2}, "uint8");
    nb::object swizzled = numpy_empty({swizzle::padded_rows(n), swizzle::padded_blocks(blocks)}, "uint8");
    auto* const to_codes = static_cast<std::uint8_t*>(numpy_data(codes));
    auto* const to_scales = static_cast<std::uint8_t*>(numpy_data(swizzled));
    if (device) {
        cuda::native_weight_host(from_b, from_scales, n, k, prepacked, to_codes, to_scales, *device);
    } else {
        native_weight::from_canonical(from_b, from_scales, n, k, to_codes, to_scales);
    }
    return nb::make_tuple(codes, swizzled);
}

}  // namespace

void bind_native_weight(nb::module_& m) {
    m.def("native_weight", make_native_weight, nb::arg("b"), nb::arg("scales"), nb::arg("device").none() = nb::none(),
          nb::arg("prepacked") = false,
          nb::sig("def native_weight(b: typing.Any, scales: typing.Any, device: int | None = None, "
                  "prepacked: bool = False) -> tuple[numpy.typing.NDArray[numpy.uint8], "
                  "numpy.typing.NDArray[numpy.uint8]]"),
          "(codes, scales) that native_nvfp4 reads of a canonical weight (block_size 16): scales in the 128x4 layout "
          "without their signs, which the codes take. Made on the host, or on a GPU, where prepacked takes the scales "
          "from the prepacked weight (K a multiple of 64).");
}

}  // namespace fp4linear::python
