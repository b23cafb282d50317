// Arrays of any library, in and out. nanobind's own caster passes no stream, copies where it should refuse, and knows
// neither ml_dtypes' types nor float4: so the import is done here.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "dtype.h"

namespace fp4linear::python {

namespace nb = nanobind;

enum class Library : std::uint8_t { numpy, torch, jax, cupy, other };

// Where arrays have to be: the device of the layer.
struct Place {
    bool cuda = false;
    int index = 0;
};
std::string place_text(const Place& place);  // "cpu", "cuda:1"

enum class Element : std::uint8_t {
    float16,
    bfloat16,
    float32,
    float64,
    uint8,
    int8,
    float8_e4m3fn,
    float4_e2m1fn_x2,  // two codes a byte
    float4_e2m1fn,     // one code a byte (ml_dtypes)
    other,
};

inline constexpr int max_ndim = 8;

// A borrowed view of somebody's memory; the owner is kept alive until destruction.
class Array {
   public:
    Array() = default;
    Array(Array&&) noexcept;
    Array& operator=(Array&&) noexcept;
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    ~Array();

    const std::uint8_t* data = nullptr;
    int ndim = 0;
    std::int64_t shape[max_ndim] = {};
    std::int64_t strides[max_ndim] = {};  // bytes
    Element element = Element::other;
    std::int64_t item_size = 0;  // bytes
    std::string dtype;           // its name, for messages
    bool read_only = false;
    Library library = Library::other;
    nb::object source;  // the array itself, of its library

    [[nodiscard]] std::int64_t size() const;
    [[nodiscard]] bool is_contiguous() const;
    [[nodiscard]] std::string shape_text() const;
    // C-contiguous bytes of all elements, in order; `storage` is used where the array is not contiguous.
    [[nodiscard]] const std::uint8_t* contiguous(std::vector<std::uint8_t>& storage) const;

    std::function<void()> release;  // gives a DLPack capsule's tensor back
};

std::string shape_text(const std::int64_t* shape, int ndim);

bool is_float(Element element);                // fp16, bf16, fp32 or fp64
std::vector<float> to_floats(const Array& a);  // the elements of a float array as fp32, in order

// What gradient-tracking tensors are worth: x must not lose its graph silently, a weight's bytes have none.
enum class Gradient : std::uint8_t { refuse_if_recording, ignore, refuse };

// Imports a NumPy array or any DLPack producer (or a capsule) at a place. On a GPU the array is safe to read on
// `stream` from now on: torch's and CuPy's where that is their current stream, others because DLPack orders them.
// Throws TypeError for what is no array, ValueError for another device, BufferError for what DLPack forbids, each
// naming `argument`.
Array import_array(nb::handle object, const char* argument, Gradient gradient, const Place& place = {},
                   void* stream = nullptr);

// Where an array is, without exporting it; the CPU for what cannot say.
Place place_of(nb::handle object);

// The same bytes on the CPU, in an array of the same library or of NumPy; synchronises. What is there already stays.
nb::object on_host(nb::handle object);

// The stream that the caller's library is putting its work on, where the library of `object` tells.
std::optional<void*> current_stream(nb::handle object, const Place& place);

// A fresh C-contiguous array at a place, of the library of `like`, to be filled on `stream` and then finished.
class Output {
   public:
    Output(const Array& like, const std::vector<std::int64_t>& shape, const Place& place, void* stream);  // of its type
    // On a GPU, of uint8 or float32.
    Output(const Array& like, Element element, const std::vector<std::int64_t>& shape, const Place& place,
           void* stream);
    [[nodiscard]] void* data() const { return data_; }
    nb::object finish();  // the array for the caller

   private:
    void make_host(const Array& like, const std::vector<std::int64_t>& shape);
    void make_device(nb::handle dtype, Element element, const std::vector<std::int64_t>& shape, void* stream);

    nb::object array_;  // the array itself, or what it is made from
    nb::object like_;
    Library library_;
    Place place_;
    void* data_ = nullptr;
};

nb::object numpy();                                                                 // the module
nb::object numpy_empty(const std::vector<std::int64_t>& shape, const char* dtype);  // C-contiguous
void* numpy_data(nb::handle array);

}  // namespace fp4linear::python
