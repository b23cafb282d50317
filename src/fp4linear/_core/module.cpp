// The compiled module fp4linear._core: thin over cpp/ and cuda/.
#include <nanobind/typing.h>

#include <atomic>

#include "bindings.h"
#include "device_array.h"

namespace fp4linear::python {

DType parse_dtype(const std::string& text) {
    for (const DType t : {DType::float16, DType::bfloat16, DType::float32})
        if (text == name_of(t)) return t;
    value_error("dtype: expected 'float16', 'bfloat16' or 'float32', got '" + text + "'");
}

namespace {

// Types of frameworks and their functions are kept from one call to the next, and belong to the interpreter that
// imported them. So does what nanobind has just looked up for this one; without it the first one's calls would fail.
void claim_for_this_interpreter() {
    static std::atomic<std::int64_t> owner{-1};  // IDs are never used again
    static auto* const of_owner = nb::detail::internals;
    const std::int64_t id = PyInterpreterState_GetID(PyInterpreterState_Get());
    std::int64_t nobody = -1;
    if (owner.compare_exchange_strong(nobody, id) || nobody == id) return;
    nb::detail::internals = of_owner;
    throw nb::import_error("fp4linear works in one interpreter of a process, and another one has imported it");
}

}  // namespace
}  // namespace fp4linear::python

NB_MODULE(_core, m) {
    fp4linear::python::claim_for_this_interpreter();
    m.doc() = "Compiled core of fp4linear.";
    // Frameworks keep layers alive in caches and globals until after the interpreter's last collection.
    nanobind::set_leak_warnings(false);
    m.attr("__version__") = FP4LINEAR_VERSION;
    m.attr("_ArrayT") = nanobind::type_var("_ArrayT");  // forward() returns the type of array that it was given
    fp4linear::python::bind_plan(m);
    fp4linear::python::bind_device_array(m);
    fp4linear::python::bind_linear(m);
    fp4linear::python::bind_functions(m);
    fp4linear::python::bind_activations(m);
    fp4linear::python::bind_native_weight(m);
    fp4linear::python::bind_xla(m);
}
