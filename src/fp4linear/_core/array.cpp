#include "array.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <utility>

#include "dlpack.h"

namespace fp4linear::python {
namespace {

[[noreturn]] void raise(PyObject* type, const std::string& message) {
    PyErr_SetString(type, message.c_str());
    throw nb::python_error();
}

std::string qualified_name(nb::handle object) {
    nb::object type = nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())));
    const auto module = nb::cast<std::string>(nb::str(type.attr("__module__")));
    const auto name = nb::cast<std::string>(nb::str(type.attr("__qualname__")));
    return module == "builtins" ? name : module + "." + name;
}

// A module that the caller has imported already; this package imports no framework.
nb::object loaded_module(const char* name) {
    nb::dict modules = nb::cast<nb::dict>(nb::module_::import_("sys").attr("modules"));
    return modules.contains(name) ? nb::borrow(modules[name]) : nb::none();
}

bool is_torch_tensor(nb::handle object, nb::object& torch) {
    torch = loaded_module("torch");
    // While torch is being imported its module is there and Tensor is not.
    return !torch.is_none() && nb::hasattr(torch, "Tensor") && nb::isinstance(object, torch.attr("Tensor"));
}

bool is_jax_array(nb::handle object) {
    nb::object jax = loaded_module("jax");
    return !jax.is_none() && nb::hasattr(jax, "Array") && nb::isinstance(object, jax.attr("Array"));
}

struct NamedElement {
    const char* name;
    Element element;
    std::int64_t size;
};
constexpr NamedElement named_elements[] = {
    {"float16", Element::float16, 2},
    {"bfloat16", Element::bfloat16, 2},
    {"float32", Element::float32, 4},
    {"float64", Element::float64, 8},
    {"uint8", Element::uint8, 1},
    {"int8", Element::int8, 1},
    {"float8_e4m3fn", Element::float8_e4m3fn, 1},
    {"float4_e2m1fn", Element::float4_e2m1fn, 1},
};

Array from_numpy(nb::handle object, const char* argument) {
    Array a;
    a.source = nb::borrow(object);
    a.library = Library::numpy;
    a.dtype = nb::cast<std::string>(nb::str(object.attr("dtype").attr("name")));
    nb::dict interface = nb::cast<nb::dict>(object.attr("__array_interface__"));
    const auto typestr = nb::cast<std::string>(interface["typestr"]);
    if (typestr[0] == '>') raise(PyExc_TypeError, std::string(argument) + ": byte order of " + a.dtype + " is swapped");
    a.item_size = nb::cast<std::int64_t>(object.attr("dtype").attr("itemsize"));
    for (const NamedElement& each : named_elements)
        if (a.dtype == each.name) a.element = each.element;
    nb::tuple data = nb::cast<nb::tuple>(interface["data"]);
    a.data = reinterpret_cast<const std::uint8_t*>(nb::cast<std::uintptr_t>(data[0]));
    a.read_only = nb::cast<bool>(data[1]);
    nb::tuple shape = nb::cast<nb::tuple>(interface["shape"]);
    if (nb::len(shape) > max_ndim)
        raise(PyExc_ValueError, std::string(argument) + ": at most 8 dimensions, got " + std::to_string(nb::len(shape)));
    a.ndim = static_cast<int>(nb::len(shape));
    nb::tuple strides = nb::cast<nb::tuple>(object.attr("strides"));
    for (int i = 0; i < a.ndim; ++i) {
        a.shape[i] = nb::cast<std::int64_t>(shape[i]);
        a.strides[i] = nb::cast<std::int64_t>(strides[i]);
    }
    return a;
}

std::string device_text(const dlpack::Device& device) {
    if (device.type == dlpack::cuda) return "cuda:" + std::to_string(device.id);
    if (device.type == dlpack::cuda_managed) return "CUDA managed memory";
    return "DLPack device type " + std::to_string(device.type) + ", id " + std::to_string(device.id);
}

void describe_dtype(Array& a, const dlpack::DataType& t) {
    struct Known {
        std::uint8_t code, bits;
        std::uint16_t lanes;
        Element element;
        const char* name;
    };
    static constexpr Known known[] = {
        {dlpack::code_float, 16, 1, Element::float16, "float16"},
        {dlpack::code_bfloat, 16, 1, Element::bfloat16, "bfloat16"},
        {dlpack::code_float, 32, 1, Element::float32, "float32"},
        {dlpack::code_float, 64, 1, Element::float64, "float64"},
        {dlpack::code_uint, 8, 1, Element::uint8, "uint8"},
        {dlpack::code_int, 8, 1, Element::int8, "int8"},
        {dlpack::code_float8_e4m3fn, 8, 1, Element::float8_e4m3fn, "float8_e4m3fn"},
        {dlpack::code_float4_e2m1fn, 4, 2, Element::float4_e2m1fn_x2, "float4_e2m1fn_x2"},
        {dlpack::code_bool, 8, 1, Element::other, "bool"},
        {dlpack::code_float8_e5m2, 8, 1, Element::other, "float8_e5m2"},
        {dlpack::code_float8_e8m0fnu, 8, 1, Element::other, "float8_e8m0fnu"},
    };
    a.item_size = std::int64_t{t.bits} * t.lanes / 8;
    for (const Known& k : known) {
        if (k.code == t.code && k.bits == t.bits && k.lanes == t.lanes) {
            a.element = k.element;
            a.dtype = k.name;
            return;
        }
    }
    const char* kind = t.code == dlpack::code_int    ? "int"
                       : t.code == dlpack::code_uint ? "uint"
                       : t.code == dlpack::code_float ? "float"
                       : t.code == dlpack::code_complex ? "complex"
                                                        : "DLPack type code ";
    a.dtype = kind + (kind[std::strlen(kind) - 1] == ' ' ? std::to_string(t.code) + ", bits " : std::string()) +
              std::to_string(t.bits) + (t.lanes == 1 ? "" : ", lanes " + std::to_string(t.lanes));
}

void fill_from_tensor(Array& a, const dlpack::Tensor& t, const char* argument) {
    const std::string name(argument);
    if (t.device.type != dlpack::cpu && t.device.type != dlpack::cuda_host)
        raise(PyExc_ValueError, name + ": expected an array on the CPU, where the layer is, got " + device_text(t.device));
    if (t.ndim < 0 || t.ndim > max_ndim)
        raise(PyExc_ValueError, name + ": at most 8 dimensions, got " + std::to_string(t.ndim));
    describe_dtype(a, t.dtype);
    if (a.item_size == 0) raise(PyExc_TypeError, name + ": type " + a.dtype + " is not supported");
    a.ndim = t.ndim;
    std::int64_t count = 1;
    for (int i = t.ndim - 1; i >= 0; --i) {
        if (t.shape[i] < 0) raise(PyExc_ValueError, name + ": negative extent in shape");
        a.shape[i] = t.shape[i];
        a.strides[i] = (t.strides != nullptr ? t.strides[i] : count) * a.item_size;
        count *= t.shape[i];
    }
    if (t.data == nullptr && count != 0) raise(PyExc_BufferError, name + ": the array has no data");
    a.data = static_cast<const std::uint8_t*>(t.data) + t.byte_offset;
}

// Takes the tensor out of the capsule: from here on its deleter is ours to call, exactly once.
Array from_capsule(nb::handle capsule, const char* argument) {
    Array a;
    if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
        auto* managed =
            static_cast<dlpack::ManagedTensorVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
        if (managed->version.major > dlpack::supported_major)
            raise(PyExc_BufferError, std::string(argument) + ": DLPack version " +
                                         std::to_string(managed->version.major) + " is newer than 1");
        PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
        a.release = [managed] {
            if (managed->deleter != nullptr) managed->deleter(managed);
        };
        a.read_only = (managed->flags & dlpack::flag_read_only) != 0;
        fill_from_tensor(a, managed->tensor, argument);
    } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
        auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
        PyCapsule_SetName(capsule.ptr(), "used_dltensor");
        a.release = [managed] {
            if (managed->deleter != nullptr) managed->deleter(managed);
        };
        fill_from_tensor(a, managed->tensor, argument);
    } else {
        raise(PyExc_BufferError, std::string(argument) + ": not a DLPack capsule, or one that was used before");
    }
    return a;
}

Array from_dlpack(nb::handle object, const char* argument) {
    nb::object export_method = object.attr("__dlpack__");
    if (nb::hasattr(object, "__dlpack_device__")) {
        // Asked first, so that no data is exported (or copied between devices) only to be refused.
        nb::tuple device = nb::cast<nb::tuple>(nb::object(object.attr("__dlpack_device__")()));
        const dlpack::Device d{static_cast<std::int32_t>(nb::cast<long>(nb::int_(nb::object(device[0])))),
                               static_cast<std::int32_t>(nb::cast<long>(nb::int_(nb::object(device[1]))))};
        if (d.type != dlpack::cpu && d.type != dlpack::cuda_host)
            raise(PyExc_ValueError, std::string(argument) + ": expected an array on the CPU, where the layer is, got " +
                                        device_text(d));
    }
    nb::object capsule;
    try {
        capsule = export_method(nb::arg("max_version") = nb::make_tuple(dlpack::supported_major, 1));
    } catch (nb::python_error& error) {
        if (!error.matches(PyExc_TypeError)) throw;
        capsule = export_method();  // a producer of before DLPack 1.0 does not know max_version
    }
    Array a = from_capsule(capsule, argument);
    a.source = nb::borrow(object);
    return a;
}

Array from_torch(nb::handle object, nb::handle torch, const char* argument, Gradient gradient) {
    const std::string name(argument);
    nb::object tensor = nb::borrow(object);
    // Tensor subclasses that intercept dispatch (FakeTensor, DTensor, quantised wrappers) own no plain memory.
    nb::object type = nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())));
    if (!type.attr("__torch_dispatch__").is(torch.attr("Tensor").attr("__torch_dispatch__")))
        raise(PyExc_TypeError, name + ": expected a plain torch.Tensor, got " + qualified_name(object));
    if (nb::cast<bool>(tensor.attr("is_meta"))) raise(PyExc_ValueError, name + ": a meta tensor holds no data");
    if (nb::cast<bool>(tensor.attr("requires_grad"))) {
        const bool recording = nb::cast<bool>(torch.attr("is_grad_enabled")());
        if (gradient == Gradient::refuse || (gradient == Gradient::refuse_if_recording && recording))
            raise(PyExc_ValueError, name + " requires grad, and this call records none: call it under torch.no_grad(), or pass " +
                                        name + ".detach()");
        tensor = tensor.attr("detach")();
    }
    if (nb::cast<bool>(tensor.attr("is_neg")())) {
        if (gradient == Gradient::refuse) raise(PyExc_ValueError, name + ": expected a tensor without a lazy negation");
        tensor = tensor.attr("resolve_neg")();
    }
    Array a = from_dlpack(tensor, argument);
    a.library = Library::torch;
    return a;
}

Array from_jax(nb::handle object, const char* argument) {
    nb::object jax = loaded_module("jax");
    if (nb::isinstance(object, jax.attr("core").attr("Tracer")))
        raise(PyExc_TypeError, std::string(argument) + ": a traced JAX value has no data; call the layer outside of jit");
    // JAX's 4-bit arrays are unpacked in host memory, one code a byte, which their DLPack type does not say.
    const auto dtype = nb::cast<std::string>(nb::str(object.attr("dtype").attr("name")));
    Array a;
    if (dtype == "float4_e2m1fn") {
        a = from_numpy(numpy().attr("asarray")(object), argument);
    } else {
        a = from_dlpack(object, argument);
    }
    a.source = nb::borrow(object);
    a.library = Library::jax;
    a.read_only = true;  // JAX arrays are values: its legacy capsules cannot say so
    return a;
}

bool has_namespace(const nb::object& object) {
    return object.is_valid() && nb::hasattr(object, "__array_namespace__");
}

}  // namespace

Array::Array(Array&& other) noexcept { *this = std::move(other); }

Array& Array::operator=(Array&& other) noexcept {
    if (this == &other) return *this;
    if (release) release();
    data = other.data;
    ndim = other.ndim;
    std::memcpy(shape, other.shape, sizeof shape);
    std::memcpy(strides, other.strides, sizeof strides);
    element = other.element;
    item_size = other.item_size;
    dtype = std::move(other.dtype);
    read_only = other.read_only;
    library = other.library;
    source = std::move(other.source);
    release = std::exchange(other.release, nullptr);
    return *this;
}

Array::~Array() {
    if (release) release();
}

std::int64_t Array::size() const {
    std::int64_t count = 1;
    for (int i = 0; i < ndim; ++i) count *= shape[i];
    return count;
}

bool Array::is_contiguous() const {
    std::int64_t expected = item_size;
    for (int i = ndim - 1; i >= 0; --i) {
        if (shape[i] == 0) return true;
        if (shape[i] != 1 && strides[i] != expected) return false;
        expected *= shape[i];
    }
    return true;
}

std::string shape_text(const std::int64_t* shape, int ndim) {
    std::string text = "[";
    for (int i = 0; i < ndim; ++i) text += (i != 0 ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

std::string Array::shape_text() const { return python::shape_text(shape, ndim); }

const std::uint8_t* Array::contiguous(std::vector<std::uint8_t>& storage) const {
    if (is_contiguous()) return data;
    storage.resize(static_cast<std::size_t>(size() * item_size));
    if (storage.empty()) return storage.data();
    const int last = ndim - 1;
    std::int64_t index[max_ndim] = {};
    std::uint8_t* out = storage.data();
    for (;;) {
        const std::uint8_t* row = data;
        for (int i = 0; i < last; ++i) row += index[i] * strides[i];
        if (strides[last] == item_size) {
            std::memcpy(out, row, static_cast<std::size_t>(shape[last] * item_size));
            out += shape[last] * item_size;
        } else {
            for (std::int64_t i = 0; i < shape[last]; ++i, out += item_size)
                std::memcpy(out, row + i * strides[last], static_cast<std::size_t>(item_size));
        }
        int axis = last - 1;
        while (axis >= 0 && ++index[axis] == shape[axis]) index[axis--] = 0;
        if (axis < 0) return storage.data();
    }
}

Array import_array(nb::handle object, const char* argument, Gradient gradient) {
    nb::object torch;
    if (nb::isinstance(object, numpy().attr("ndarray"))) return from_numpy(object, argument);
    if (is_torch_tensor(object, torch)) return from_torch(object, torch, argument, gradient);
    if (is_jax_array(object)) return from_jax(object, argument);
    if (nb::hasattr(object, "__dlpack__")) return from_dlpack(object, argument);
    if (PyCapsule_CheckExact(object.ptr())) return from_capsule(object, argument);
    raise(PyExc_TypeError, std::string(argument) + ": expected an array (NumPy, or any that exports DLPack), got " +
                               qualified_name(object));
}

nb::object numpy() { return nb::module_::import_("numpy"); }

nb::object numpy_empty(const std::vector<std::int64_t>& shape, const char* dtype) {
    nb::list extents;
    for (const std::int64_t extent : shape) extents.append(extent);
    return numpy().attr("empty")(nb::tuple(extents), dtype);
}

void* numpy_data(nb::handle array) {
    nb::dict interface = nb::cast<nb::dict>(array.attr("__array_interface__"));
    return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(nb::cast<nb::tuple>(interface["data"])[0]));
}

Output::Output(const Array& like, const std::vector<std::int64_t>& shape) : like_(like.source), library_(like.library) {
    nb::list list;
    for (const std::int64_t extent : shape) list.append(extent);
    nb::tuple extents(list);
    if (library_ == Library::torch) {
        array_ = loaded_module("torch").attr("empty")(extents, nb::arg("dtype") = like_.attr("dtype"),
                                                      nb::arg("device") = like_.attr("device"));
        data_ = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(array_.attr("data_ptr")()));
    } else if (library_ == Library::numpy || library_ == Library::jax) {
        array_ = numpy().attr("empty")(extents, like_.attr("dtype"));
        data_ = numpy_data(array_);
    } else if (!has_namespace(like_) && like.element != Element::bfloat16) {
        array_ = numpy_empty(shape, like.dtype.c_str());
        data_ = numpy_data(array_);
    } else {
        std::size_t bytes = static_cast<std::size_t>(like.item_size);
        std::vector<std::size_t> sizes;
        for (const std::int64_t extent : shape) {
            sizes.push_back(static_cast<std::size_t>(extent));
            bytes *= static_cast<std::size_t>(extent);
        }
        auto* storage = new std::uint8_t[bytes == 0 ? 1 : bytes];
        nb::capsule owner(storage, [](void* p) noexcept { delete[] static_cast<std::uint8_t*>(p); });
        const nb::dlpack::dtype dtype =
            like.element == Element::bfloat16
                ? nb::dlpack::dtype{dlpack::code_bfloat, 16, 1}
                : nb::dlpack::dtype{dlpack::code_float, static_cast<std::uint8_t>(8 * like.item_size), 1};
        array_ = nb::cast(nb::ndarray<>(storage, sizes.size(), sizes.data(), owner, nullptr, dtype));
        data_ = storage;
    }
}

nb::object Output::finish() {
    if (library_ == Library::jax) return loaded_module("jax").attr("device_put")(array_, like_.attr("device"));
    // The array API standard's way to the library of an object. Without it the caller gets a NumPy array, or, for the
    // bfloat16 that NumPy lacks, a plain DLPack producer.
    if (library_ == Library::other && has_namespace(like_))
        return like_.attr("__array_namespace__")().attr("from_dlpack")(array_);
    return array_;
}

}  // namespace fp4linear::python
