#include "device_call.h"

#include "bindings.h"

namespace fp4linear::python {

std::optional<void*> parse_stream(nb::handle stream) {
    if (stream.is_none()) return std::nullopt;
    nb::object handle = nb::borrow(stream);
    if (PyLong_CheckExact(stream.ptr())) {
        // Asking an int for the protocol would raise and drop an error on every call.
    } else if (nb::hasattr(stream, "__cuda_stream__")) {
        nb::object protocol = stream.attr("__cuda_stream__");
        if (PyCallable_Check(protocol.ptr()) != 0) protocol = protocol();
        if (!nb::isinstance<nb::tuple>(protocol) || nb::len(protocol) != 2)
            type_error("stream: __cuda_stream__ did not give (version, handle)");
        handle = nb::object(protocol[1]);
    } else if (nb::hasattr(stream, "cuda_stream")) {
        handle = stream.attr("cuda_stream");  // torch.cuda.Stream before it had the protocol
    }
    if (!PyLong_Check(handle.ptr()) || PyBool_Check(handle.ptr()))
        type_error("stream: expected an integer (a cudaStream_t) or an object with __cuda_stream__");
    return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(handle));
}

std::optional<std::int64_t> row_stride(const Array& x) {
    const int last = x.ndim - 1;
    if (reinterpret_cast<std::uintptr_t>(x.data) % static_cast<std::uintptr_t>(x.item_size) != 0) return std::nullopt;
    if (x.shape[last] > 1 && x.strides[last] != x.item_size) return std::nullopt;
    std::int64_t stride = 0, rows = 1;
    for (int i = last - 1; i >= 0; --i) {
        if (x.shape[i] == 1) continue;
        if (rows == 1) {
            stride = x.strides[i];
        } else if (x.strides[i] != stride * rows) {
            return std::nullopt;
        }
        rows *= x.shape[i];
    }
    if (stride % x.item_size != 0) return std::nullopt;
    return rows == 1 ? x.shape[last] : stride / x.item_size;
}

}  // namespace fp4linear::python
