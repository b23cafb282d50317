#include "array.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "device_array.h"
#include "dlpack.h"
#include "formats/float16.h"

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

[[noreturn]] void raise_naming(nb::python_error& error, PyObject* type, const char* argument) {
    auto text = nb::cast<std::string>(nb::str(error.value()));
    text.resize(std::min(text.size(), text.find('\n')));  // torch appends its C++ frames
    nb::raise_from(error, type, "%s: %s", argument, text.c_str());
    throw nb::python_error();
}

// An attribute's name, interned once: PyObject_GetAttrString makes and hashes a string on every call.
class Name {
   public:
    explicit Name(const char* text) : text_(PyUnicode_InternFromString(text)) {}
    [[nodiscard]] nb::object of(nb::handle object) const {
        PyObject* value = PyObject_GetAttr(object.ptr(), text_);
        if (value == nullptr) throw nb::python_error();
        return nb::steal(value);
    }
    [[nodiscard]] bool is_true_of(nb::handle object) const { return of(object).ptr() == Py_True; }

   private:
    PyObject* text_;  // never freed
};

// A module that the caller has imported already; this package imports no framework.
nb::object loaded_module(const char* name) {
    PyObject* module = PyImport_GetModule(nb::str(name).ptr());
    if (module == nullptr) PyErr_Clear();
    return module == nullptr ? nb::none() : nb::steal(module);
}

// A class of a framework, looked up until the framework is there and then kept: a call costs microseconds, and so would
// the look-up. Never freed, since modules live as long.
class FrameworkType {
   public:
    FrameworkType(const char* module, const char* name) : module_(module), name_(name) {}

    [[nodiscard]] bool is_instance(nb::handle object) {
        PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
        if (type == type_.ptr()) return true;
        if (!find()) return false;
        return nb::isinstance(object, type_);
    }
    [[nodiscard]] bool is_exact(nb::handle object) const {
        return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == type_.ptr();
    }
    [[nodiscard]] const nb::object& type() const { return type_; }
    [[nodiscard]] const nb::object& module() const { return loaded_; }

   private:
    bool find() {
        if (type_.is_valid()) return true;
        nb::object module = loaded_module(module_);
        // While a framework is being imported its module is there and the class is not.
        if (module.is_none() || !nb::hasattr(module, name_)) return false;
        type_ = module.attr(name_);
        loaded_ = std::move(module);
        return true;
    }

    const char *module_, *name_;
    nb::object type_, loaded_;
};

FrameworkType& numpy_array() {
    static auto* type = new FrameworkType("numpy", "ndarray");
    return *type;
}
FrameworkType& torch_tensor() {
    static auto* type = new FrameworkType("torch", "Tensor");
    return *type;
}
FrameworkType& torch_parameter() {
    static auto* type = new FrameworkType("torch.nn", "Parameter");
    return *type;
}
FrameworkType& jax_array() {
    static auto* type = new FrameworkType("jax", "Array");
    return *type;
}
FrameworkType& cupy_array() {
    static auto* type = new FrameworkType("cupy", "ndarray");
    return *type;
}

struct NamedElement {
    const char* name;
    Element element;
    std::int64_t size;
    bool of_numpy;  // else ml_dtypes adds it
};
constexpr NamedElement named_elements[] = {
    {"float16", Element::float16, 2, true},
    {"bfloat16", Element::bfloat16, 2, false},
    {"float32", Element::float32, 4, true},
    {"float64", Element::float64, 8, true},
    {"uint8", Element::uint8, 1, true},
    {"int8", Element::int8, 1, true},
    {"float8_e4m3fn", Element::float8_e4m3fn, 1, false},
    {"float4_e2m1fn", Element::float4_e2m1fn, 1, false},
};

Element element_named(const std::string& name) {
    for (const NamedElement& each : named_elements)
        if (name == each.name) return each.element;
    return Element::other;
}

// NumPy's own types are singletons, so most arrays are known by the address of their dtype; its name is a Python
// property.
const NamedElement* element_of(nb::handle dtype) {
    static const auto* known = [] {
        auto* list = new std::vector<std::pair<nb::object, const NamedElement*>>;
        for (const NamedElement& each : named_elements)
            if (each.of_numpy) list->emplace_back(numpy().attr("dtype")(each.name), &each);
        return list;
    }();
    for (const auto& [type, element] : *known)
        if (dtype.is(type)) return element;
    return nullptr;
}

Array from_numpy(nb::handle object, const char* argument) {
    static const Name dtype_name("dtype"), interface_name("__array_interface__");
    Array a;
    a.source = nb::borrow(object);
    a.library = Library::numpy;
    nb::object dtype = dtype_name.of(object);
    nb::dict interface = nb::cast<nb::dict>(interface_name.of(object));
    if (const NamedElement* element = element_of(dtype)) {
        a.dtype = element->name;
        a.element = element->element;
        a.item_size = element->size;
    } else {
        a.dtype = nb::cast<std::string>(nb::str(dtype.attr("name")));
        a.item_size = nb::cast<std::int64_t>(dtype.attr("itemsize"));
        if (nb::cast<std::string>(interface["typestr"])[0] == '>')
            raise(PyExc_TypeError, std::string(argument) + ": byte order of " + a.dtype + " is swapped");
        a.element = element_named(a.dtype);
    }
    nb::tuple data = nb::cast<nb::tuple>(interface["data"]);
    a.data = reinterpret_cast<const std::uint8_t*>(nb::cast<std::uintptr_t>(data[0]));
    a.read_only = nb::cast<bool>(data[1]);
    nb::tuple shape = nb::cast<nb::tuple>(interface["shape"]);
    if (nb::len(shape) > max_ndim)
        raise(PyExc_ValueError,
              std::string(argument) + ": at most 8 dimensions, got " + std::to_string(nb::len(shape)));
    a.ndim = static_cast<int>(nb::len(shape));
    nb::object strides = interface["strides"];  // None: C-contiguous
    std::int64_t next = a.item_size;
    for (int i = a.ndim - 1; i >= 0; --i) {
        a.shape[i] = nb::cast<std::int64_t>(shape[i]);
        a.strides[i] = strides.is_none() ? next : nb::cast<std::int64_t>(strides[i]);
        next *= a.shape[i];
    }
    return a;
}

Array from_cupy(nb::handle object) {
    Array a;
    a.source = nb::borrow(object);
    a.library = Library::cupy;
    a.dtype = nb::cast<std::string>(nb::str(object.attr("dtype").attr("name")));
    a.item_size = nb::cast<std::int64_t>(object.attr("dtype").attr("itemsize"));
    a.element = element_named(a.dtype);
    a.data = reinterpret_cast<const std::uint8_t*>(nb::cast<std::uintptr_t>(object.attr("data").attr("ptr")));
    nb::tuple shape = nb::cast<nb::tuple>(object.attr("shape"));
    nb::tuple strides = nb::cast<nb::tuple>(object.attr("strides"));
    if (nb::len(shape) > max_ndim) raise(PyExc_ValueError, "a CuPy array of more than 8 dimensions");
    a.ndim = static_cast<int>(nb::len(shape));
    for (int i = 0; i < a.ndim; ++i) {
        a.shape[i] = nb::cast<std::int64_t>(shape[i]);
        a.strides[i] = nb::cast<std::int64_t>(strides[i]);
    }
    return a;
}

std::string device_text(const dlpack::Device& device) {
    if (device.type == dlpack::cpu) return "cpu";
    if (device.type == dlpack::cuda_host) return "pinned host memory";
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
    const char* kind = t.code == dlpack::code_int       ? "int"
                       : t.code == dlpack::code_uint    ? "uint"
                       : t.code == dlpack::code_float   ? "float"
                       : t.code == dlpack::code_complex ? "complex"
                                                        : "DLPack type code ";
    a.dtype = kind + (kind[std::strlen(kind) - 1] == ' ' ? std::to_string(t.code) + ", bits " : std::string()) +
              std::to_string(t.bits) + (t.lanes == 1 ? "" : ", lanes " + std::to_string(t.lanes));
}

void check_place(const dlpack::Device& device, const Place& place, const char* argument) {
    const bool here = place.cuda ? device.type == dlpack::cuda && device.id == place.index
                                 : device.type == dlpack::cpu || device.type == dlpack::cuda_host;
    if (here) return;
    raise(PyExc_ValueError, std::string(argument) + ": expected an array on " + place_text(place) +
                                ", where the layer is, got one on " + device_text(device));
}

void fill_from_tensor(Array& a, const dlpack::Tensor& t, const char* argument, const Place& place) {
    const std::string name(argument);
    check_place(t.device, place, argument);
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
Array from_capsule(nb::handle capsule, const char* argument, const Place& place) {
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
        fill_from_tensor(a, managed->tensor, argument, place);
    } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
        auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
        PyCapsule_SetName(capsule.ptr(), "used_dltensor");
        a.release = [managed] {
            if (managed->deleter != nullptr) managed->deleter(managed);
        };
        fill_from_tensor(a, managed->tensor, argument, place);
    } else {
        raise(PyExc_BufferError, std::string(argument) + ": not a DLPack capsule, or one that was used before");
    }
    return a;
}

// Throws python_error, also for what is no pair of integers.
dlpack::Device dlpack_device(nb::handle object) {
    nb::object device = object.attr("__dlpack_device__")();
    if (!nb::isinstance<nb::tuple>(device) || nb::len(device) != 2)
        raise(PyExc_BufferError, "__dlpack_device__() did not return (device_type, device_id)");
    std::int32_t numbers[2];
    for (int i = 0; i < 2; ++i) {
        const long number = PyLong_AsLong(nb::int_(nb::object(device[i])).ptr());
        if (number == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
        numbers[i] = static_cast<std::int32_t>(number);
    }
    return {numbers[0], numbers[1]};
}

// The array API's number of a CUDA stream: 1 is the legacy default stream, 2 the per-thread one.
std::uintptr_t stream_number(void* stream) { return stream == nullptr ? 1 : reinterpret_cast<std::uintptr_t>(stream); }

Array from_dlpack(nb::handle object, const char* argument, const Place& place, void* stream) {
    nb::object export_method = object.attr("__dlpack__");
    nb::dict keywords;
    if (place.cuda) keywords["stream"] = stream_number(stream);
    nb::object capsule;
    dlpack::Device device{dlpack::cpu, 0};
    bool device_known = false;
    try {
        // Asked first, so that no data is exported (or copied between devices) only to be refused.
        device_known = nb::hasattr(object, "__dlpack_device__");
        if (device_known) device = dlpack_device(object);
    } catch (nb::python_error& error) {
        if (!error.matches(PyExc_Exception)) throw;
        raise_naming(error, PyExc_BufferError, argument);
    }
    if (device_known) check_place(device, place, argument);
    try {
        try {
            capsule = export_method(nb::arg("max_version") = nb::make_tuple(dlpack::supported_major, 1), **keywords);
        } catch (nb::python_error& error) {
            if (!error.matches(PyExc_TypeError)) throw;
            capsule = export_method(**keywords);  // a producer of before DLPack 1.0 does not know max_version
        }
    } catch (nb::python_error& error) {
        // The producer's own words, under the name of the argument.
        if (!error.matches(PyExc_Exception)) throw;
        raise_naming(error, PyExc_BufferError, argument);
    }
    Array a = from_capsule(capsule, argument, place);
    a.source = nb::borrow(object);
    return a;
}

// The exchange table of torch.Tensor, or null in a torch that has none (before 2.10).
const dlpack::ExchangeApi* torch_exchange() {
    static const dlpack::ExchangeApi* const api = []() -> const dlpack::ExchangeApi* {
        const nb::object& type = torch_tensor().type();
        if (!nb::hasattr(type, "__dlpack_c_exchange_api__")) return nullptr;
        nb::object capsule = type.attr("__dlpack_c_exchange_api__");
        if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
        auto* header =
            static_cast<dlpack::ExchangeApiHeader*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
        while (header != nullptr && header->version.major > dlpack::supported_major) header = header->previous;
        return reinterpret_cast<const dlpack::ExchangeApi*>(header);
    }();
    return api;
}

Array from_torch(nb::handle object, const char* argument, Gradient gradient, const Place& place, void* stream) {
    const std::string name(argument);
    nb::object tensor = nb::borrow(object);
    // Tensor subclasses that intercept dispatch (FakeTensor, DTensor, quantised wrappers) own no plain memory.
    if (!torch_tensor().is_exact(object) && !torch_parameter().is_exact(object)) {
        nb::object type = nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())));
        if (!torch_parameter().is_instance(object) &&
            !type.attr("__torch_dispatch__").is(torch_tensor().type().attr("__torch_dispatch__")))
            raise(PyExc_TypeError, name + ": expected a plain torch.Tensor, got " + qualified_name(object));
    }
    static const Name requires_grad("requires_grad");
    // Called through its descriptor: a bound method would be made and thrown away.
    static const auto* is_neg = new nb::object(torch_tensor().type().attr("is_neg"));
    if (requires_grad.is_true_of(tensor)) {
        const bool recording = nb::cast<bool>(torch_tensor().module().attr("is_grad_enabled")());
        if (gradient == Gradient::refuse || (gradient == Gradient::refuse_if_recording && recording))
            raise(PyExc_ValueError,
                  name + " requires grad, and this call records none: call it under torch.no_grad(), or pass " + name +
                      ".detach()");
        tensor = tensor.attr("detach")();
    }
    if (nb::object((*is_neg)(tensor)).ptr() == Py_True) {
        if (gradient == Gradient::refuse) raise(PyExc_ValueError, name + ": expected a tensor without a lazy negation");
        tensor = tensor.attr("resolve_neg")();
    }
    const dlpack::ExchangeApi* api = torch_exchange();
    Array a;
    if (api != nullptr && api->tensor_from_object != nullptr) {
        dlpack::Tensor borrowed;
        if (api->tensor_from_object(tensor.ptr(), &borrowed) != 0) {
            nb::python_error error;  // meta, sparse, batched by vmap, and other tensors without plain memory
            if (nb::cast<bool>(tensor.attr("is_meta"))) raise(PyExc_ValueError, name + ": a meta tensor holds no data");
            raise_naming(error, PyExc_TypeError, argument);
        }
        fill_from_tensor(a, borrowed, argument, place);
    } else {
        a = from_dlpack(tensor, argument, place, stream);
    }
    a.source = std::move(tensor);  // owns the memory
    a.library = Library::torch;
    return a;
}

Array from_jax(nb::handle object, const char* argument, const Place& place, void* stream) {
    if (nb::isinstance(object, jax_array().module().attr("core").attr("Tracer")))
        raise(PyExc_TypeError,
              std::string(argument) +
                  ": a traced JAX value has no data; call the layer outside of jit, or use fp4linear.jax.linear");
    // JAX's 4-bit arrays are unpacked in host memory, one code a byte, which their DLPack type does not say.
    const auto dtype = nb::cast<std::string>(nb::str(object.attr("dtype").attr("name")));
    Array a;
    if (dtype == "float4_e2m1fn") {
        a = from_numpy(numpy().attr("asarray")(object), argument);
    } else {
        a = from_dlpack(object, argument, place, stream);
    }
    a.source = nb::borrow(object);
    a.library = Library::jax;
    a.read_only = true;  // JAX arrays are values: its legacy capsules cannot say so
    return a;
}

bool has_namespace(const nb::object& object) { return object.is_valid() && nb::hasattr(object, "__array_namespace__"); }

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
    if (size() == 0) return true;  // whatever the strides say: NumPy's are 0 there
    std::int64_t expected = item_size;
    for (int i = ndim - 1; i >= 0; --i) {
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

bool is_float(Element e) {
    return e == Element::float16 || e == Element::bfloat16 || e == Element::float32 || e == Element::float64;
}

std::vector<float> to_floats(const Array& a) {
    std::vector<std::uint8_t> storage;
    const std::uint8_t* bytes = a.contiguous(storage);
    std::vector<float> values(static_cast<std::size_t>(a.size()));
    for (std::size_t i = 0; i < values.size(); ++i) {
        const std::uint8_t* p = bytes + i * static_cast<std::size_t>(a.item_size);
        if (a.element == Element::float64) {
            double d = 0;
            std::memcpy(&d, p, sizeof d);
            values[i] = static_cast<float>(d);
        } else if (a.element == Element::float32) {
            std::memcpy(&values[i], p, sizeof(float));
        } else {
            std::uint16_t bits = 0;
            std::memcpy(&bits, p, sizeof bits);
            values[i] = a.element == Element::float16 ? float_from_half(bits) : float_from_bfloat(bits);
        }
    }
    return values;
}

std::string place_text(const Place& place) { return place.cuda ? "cuda:" + std::to_string(place.index) : "cpu"; }

Array import_array(nb::handle object, const char* argument, Gradient gradient, const Place& place, void* stream) {
    if (torch_tensor().is_instance(object)) return from_torch(object, argument, gradient, place, stream);
    if (numpy_array().is_instance(object)) {
        if (place.cuda) check_place({dlpack::cpu, 0}, place, argument);
        return from_numpy(object, argument);
    }
    if (jax_array().is_instance(object)) return from_jax(object, argument, place, stream);
    if (cupy_array().is_instance(object)) {
        check_place({dlpack::cuda, nb::cast<int>(object.attr("device").attr("id"))}, place, argument);
        return from_cupy(object);
    }
    if (!PyType_Check(object.ptr()) && nb::hasattr(object, "__dlpack__"))
        return from_dlpack(object, argument, place, stream);
    if (PyCapsule_CheckExact(object.ptr())) return from_capsule(object, argument, place);
    raise(PyExc_TypeError, std::string(argument) + ": expected an array (NumPy, or any that exports DLPack), got " +
                               qualified_name(object));
}

Place place_of(nb::handle object) {
    if (numpy_array().is_instance(object) || PyType_Check(object.ptr()) || !nb::hasattr(object, "__dlpack_device__"))
        return {};
    if (jax_array().is_instance(object) && nb::isinstance(object, jax_array().module().attr("core").attr("Tracer")))
        return {};
    if (torch_tensor().is_instance(object) && nb::cast<bool>(object.attr("is_meta"))) return {};
    try {
        const dlpack::Device device = dlpack_device(object);
        return {device.type == dlpack::cuda, device.type == dlpack::cuda ? device.id : 0};
    } catch (nb::python_error& error) {
        if (!error.matches(PyExc_Exception)) throw;
        return {};  // the import that follows says what is wrong, under the argument's name
    }
}

nb::object on_host(nb::handle object) {
    if (!place_of(object).cuda) return nb::borrow(object);
    if (torch_tensor().is_instance(object)) return object.attr("detach")().attr("cpu")();
    if (cupy_array().is_instance(object)) return object.attr("get")();
    if (jax_array().is_instance(object)) return numpy().attr("asarray")(object);
    raise(PyExc_TypeError,
          "expected an array of torch, CuPy, JAX or NumPy, got " + qualified_name(object) + " on a GPU");
}

std::optional<void*> current_stream(nb::handle object, const Place& place) {
    if (torch_tensor().is_instance(object)) {
        const dlpack::ExchangeApi* api = torch_exchange();
        void* stream = nullptr;
        if (api != nullptr && api->current_stream != nullptr) {
            if (api->current_stream(dlpack::cuda, place.index, &stream) != 0) throw nb::python_error();
            return stream;
        }
        nb::object current = torch_tensor().module().attr("cuda").attr("current_stream")(place.index);
        return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(current.attr("cuda_stream")));
    }
    if (cupy_array().is_instance(object)) {
        nb::object current = cupy_array().module().attr("cuda").attr("get_current_stream")();
        return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(current.attr("ptr")));
    }
    return std::nullopt;
}

nb::object numpy() {
    static auto* module = new nb::object(nb::module_::import_("numpy"));
    return *module;
}

nb::object numpy_empty(const std::vector<std::int64_t>& shape, const char* dtype) {
    nb::list extents;
    for (const std::int64_t extent : shape) extents.append(extent);
    return numpy().attr("empty")(nb::tuple(extents), dtype);
}

void* numpy_data(nb::handle array) {
    nb::dict interface = nb::cast<nb::dict>(array.attr("__array_interface__"));
    return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(nb::cast<nb::tuple>(interface["data"])[0]));
}

namespace {

nb::tuple extents_of(const std::vector<std::int64_t>& shape) {
    nb::list list;
    for (const std::int64_t extent : shape) list.append(extent);
    return nb::tuple(list);
}

// torch's own allocator through its exchange table: 0.7 us where torch.empty takes 2.
nb::object torch_empty(const std::vector<std::int64_t>& shape, const Array& like, const Place& place, void** data) {
    const dlpack::ExchangeApi* api = torch_exchange();
    if (api == nullptr) {
        nb::object y =
            torch_tensor().module().attr("empty")(extents_of(shape), nb::arg("dtype") = like.source.attr("dtype"),
                                                  nb::arg("device") = like.source.attr("device"));
        *data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(y.attr("data_ptr")()));
        return y;
    }
    std::vector<std::int64_t> extents(shape), strides(shape.size());
    std::int64_t count = 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
        strides[i] = count;
        count *= shape[i];
    }
    const std::uint8_t code = like.element == Element::bfloat16 ? dlpack::code_bfloat : dlpack::code_float;
    dlpack::Tensor prototype{.data = nullptr,
                             .device = {place.cuda ? dlpack::cuda : dlpack::cpu, place.index},
                             .ndim = static_cast<std::int32_t>(shape.size()),
                             .dtype = {code, static_cast<std::uint8_t>(8 * like.item_size), 1},
                             .shape = extents.data(),
                             .strides = strides.data(),
                             .byte_offset = 0};
    dlpack::ManagedTensorVersioned* managed = nullptr;
    std::string problem;
    const auto note = [](void* context, const char* kind, const char* message) {
        *static_cast<std::string*>(context) = std::string(kind) + ": " + message;
    };
    if (api->allocate(&prototype, &managed, &problem, note) != 0) {
        if (PyErr_Occurred() != nullptr) throw nb::python_error();
        raise(PyExc_MemoryError, "y: " + problem);
    }
    *data = static_cast<std::uint8_t*>(managed->tensor.data) + managed->tensor.byte_offset;
    void* object = nullptr;
    if (api->object_from_managed(managed, &object) != 0) throw nb::python_error();
    return nb::steal(static_cast<PyObject*>(object));
}

}  // namespace

Output::Output(const Array& like, const std::vector<std::int64_t>& shape, const Place& place, void* stream)
    : like_(like.source), library_(like.library), place_(place) {
    if (library_ == Library::torch) {
        array_ = torch_empty(shape, like, place, &data_);
    } else if (place.cuda) {
        make_device(library_ == Library::cupy ? like_.attr("dtype") : nb::none(), like.element, shape, stream);
    } else {
        make_host(like, shape);
    }
}

void Output::make_host(const Array& like, const std::vector<std::int64_t>& shape) {
    if (library_ == Library::numpy || library_ == Library::jax) {
        array_ = numpy().attr("empty")(extents_of(shape), like_.attr("dtype"));
        data_ = numpy_data(array_);
        return;
    }
    if (!has_namespace(like_) && like.element != Element::bfloat16) {
        array_ = numpy_empty(shape, like.dtype.c_str());
        data_ = numpy_data(array_);
        return;
    }
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
    array_ = nb::cast(nb::ndarray<nb::array_api>(storage, sizes.size(), sizes.data(), owner, nullptr, dtype));
    data_ = storage;
}

void Output::make_device(nb::handle dtype, Element element, const std::vector<std::int64_t>& shape, void* stream) {
    if (library_ == Library::cupy) {
        array_ = cupy_array().module().attr("empty")(extents_of(shape), dtype);
        data_ = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(array_.attr("data").attr("ptr")));
        return;
    }
    array_ = make_device_array(shape, element, place_.index, stream, &data_);
}

Output::Output(const Array& like, Element element, const std::vector<std::int64_t>& shape, const Place& place,
               void* stream)
    : like_(like.source), library_(like.library), place_(place) {
    const char* const name = element == Element::uint8 ? "uint8" : "float32";
    if (library_ == Library::torch) {
        nb::object torch = torch_tensor().module();
        array_ = torch.attr("empty")(extents_of(shape), nb::arg("dtype") = torch.attr(name),
                                     nb::arg("device") = like_.attr("device"));
        data_ = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(array_.attr("data_ptr")()));
    } else {
        make_device(nb::str(name), element, shape, stream);
    }
}

nb::object Output::finish() {
    if (library_ == Library::jax) {
        if (place_.cuda) return jax_array().module().attr("dlpack").attr("from_dlpack")(array_);
        return jax_array().module().attr("device_put")(array_, like_.attr("device"));
    }
    // The array API standard's way to the library of an object. Without it the caller gets a NumPy array, or, for the
    // bfloat16 that NumPy lacks and on a GPU, a plain DLPack producer.
    if (library_ == Library::other && has_namespace(like_))
        return like_.attr("__array_namespace__")().attr("from_dlpack")(array_);
    return array_;
}

}  // namespace fp4linear::python
