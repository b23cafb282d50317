#include "device_array.h"

#include <nanobind/stl/optional.h>

#include <memory>
#include <optional>
#include <utility>

#include "cuda/weight.h"
#include "dlpack.h"

namespace fp4linear::python {

namespace nb = nanobind;

namespace {

// Freed in the order of the stream that wrote it.
struct Memory {
    Memory(std::size_t bytes, int device_index, void* writer) : device(device_index), stream(writer) {
        data = cuda::allocate(bytes, stream);
    }
    ~Memory() {
        try {
            const cuda::CurrentDevice current(device);
            // A consumer gives the memory up once its last use is enqueued, not once that has run.
            for (void* consumer : consumers) cuda::order(consumer, stream);
            cuda::release(data, stream);
        } catch (...) {
            data = nullptr;  // a device that is gone at exit took the memory with it
        }
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    int device;
    void* stream;
    void* data = nullptr;
    std::vector<void*> consumers;  // streams that the memory was given to
};

struct DeviceArray {
    std::shared_ptr<Memory> memory;
    std::vector<std::int64_t> shape, strides;
    dlpack::DataType type{};
};

dlpack::DataType dlpack_type(Element element) {
    switch (element) {
        case Element::uint8: return {dlpack::code_uint, 8, 1};
        case Element::float32: return {dlpack::code_float, 32, 1};
        case Element::bfloat16: return {dlpack::code_bfloat, 16, 1};
        default: return {dlpack::code_float, 16, 1};
    }
}

// What an exported tensor owns; the tensor's shape and strides point into it.
template <class Managed>
struct Export {
    DeviceArray array;
    Managed managed{};
};

template <class Managed>
Managed* make_export(const DeviceArray& array) {
    auto* exported = new Export<Managed>{array, {}};
    Managed& m = exported->managed;
    m.context = exported;
    m.deleter = [](Managed* self) { delete static_cast<Export<Managed>*>(self->context); };
    m.tensor = {.data = array.memory->data,
                .device = {dlpack::cuda, array.memory->device},
                .ndim = static_cast<std::int32_t>(array.shape.size()),
                .dtype = array.type,
                .shape = exported->array.shape.data(),
                .strides = exported->array.strides.data(),
                .byte_offset = 0};
    return &m;
}

// A capsule nobody consumed still owns its tensor.
template <class Managed>
nb::object make_capsule(Managed* managed, const char* name) {
    const auto destroy = [](PyObject* capsule) {
        const char* const now = PyCapsule_GetName(capsule);
        if (now == nullptr || now[0] == 'u') return;  // "used_..."
        auto* tensor = static_cast<Managed*>(PyCapsule_GetPointer(capsule, now));
        tensor->deleter(tensor);
    };
    PyObject* capsule = PyCapsule_New(managed, name, destroy);
    if (capsule == nullptr) throw nb::python_error();
    return nb::steal(capsule);
}

// stream: the array API's numbers (1 the legacy default, 2 the per-thread one, -1 no order wanted, None the default).
nb::object to_dlpack(const DeviceArray& array, std::optional<std::int64_t> stream, nb::handle max_version,
                     nb::handle dl_device, nb::handle copy) {
    if (!dl_device.is_none()) {
        nb::tuple wanted = nb::cast<nb::tuple>(dl_device);
        if (nb::cast<int>(nb::int_(nb::object(wanted[0]))) != dlpack::cuda ||
            nb::cast<int>(nb::int_(nb::object(wanted[1]))) != array.memory->device)
            throw nb::buffer_error("dl_device: the array stays on its device");
    }
    if (!copy.is_none() && nb::cast<bool>(copy)) throw nb::buffer_error("copy: the export shares its memory");
    const std::int64_t number = stream.value_or(1);
    if (number != -1) {
        const cuda::CurrentDevice current(array.memory->device);
        void* const consumer = reinterpret_cast<void*>(static_cast<std::uintptr_t>(number));
        cuda::order(array.memory->stream, consumer);
        array.memory->consumers.push_back(consumer);
    }
    const bool versioned = !max_version.is_none() && nb::cast<int>(nb::cast<nb::tuple>(max_version)[0]) >=
                                                         static_cast<int>(dlpack::supported_major);
    if (!versioned) return make_capsule(make_export<dlpack::ManagedTensor>(array), "dltensor");
    auto* managed = make_export<dlpack::ManagedTensorVersioned>(array);
    managed->version = {dlpack::supported_major, 1};
    managed->flags = 0;
    return make_capsule(managed, "dltensor_versioned");
}

}  // namespace

nb::object make_device_array(const std::vector<std::int64_t>& shape, Element element, int device, void* stream,
                             void** data) {
    DeviceArray array;
    array.shape = shape;
    array.strides.resize(shape.size());
    std::int64_t count = 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
        array.strides[i] = count;
        count *= shape[i];
    }
    array.type = dlpack_type(element);
    const auto bytes = static_cast<std::size_t>(count) * (array.type.bits / 8);
    array.memory = std::make_shared<Memory>(bytes, device, stream);
    *data = array.memory->data;
    return nb::cast(std::move(array));
}

void bind_device_array(nb::module_& m) {
    nb::class_<DeviceArray>(m, "DeviceArray",
                            "A result on a GPU for callers whose library has no from_dlpack(): a DLPack producer.")
        .def_prop_ro(
            "shape",
            [](const DeviceArray& a) {
                nb::list list;
                for (const std::int64_t extent : a.shape) list.append(extent);
                return nb::tuple(list);
            },
            nb::sig("def shape(self) -> tuple[int, ...]"))
        .def(
            "__dlpack_device__",
            [](const DeviceArray& a) { return nb::make_tuple(static_cast<int>(dlpack::cuda), a.memory->device); },
            nb::sig("def __dlpack_device__(self) -> tuple[int, int]"))
        .def("__dlpack__", to_dlpack, nb::kw_only(), nb::arg("stream").none() = nb::none(),
             nb::arg("max_version").none() = nb::none(), nb::arg("dl_device").none() = nb::none(),
             nb::arg("copy").none() = nb::none(),
             nb::sig("def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None, "
                     "dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> typing.Any"));
}

}  // namespace fp4linear::python
