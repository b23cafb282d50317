// The compiled module fp4linear._core: thin over cpp/ and cuda/.
#include <nanobind/typing.h>

#include "bindings.h"
#include "device_array.h"

namespace fp4linear::python {

DType parse_dtype(const std::string& text) {
    for (const DType t : {DType::float16, DType::bfloat16, DType::float32})
        if (text == name_of(t)) return t;
    value_error("dtype: expected 'float16', 'bfloat16' or 'float32', got '" + text + "'");
}

}  // namespace fp4linear::python

NB_MODULE(_core, m) {
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
    fp4linear::python::bind_xla(m);
}
