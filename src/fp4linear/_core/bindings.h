// What the files of this module give each other.
#pragma once
#include <nanobind/nanobind.h>

#include <string>

#include "plan.h"

namespace fp4linear::python {

namespace nb = nanobind;

[[noreturn]] inline void value_error(const std::string& message) { throw nb::value_error(message.c_str()); }
[[noreturn]] inline void type_error(const std::string& message) { throw nb::type_error(message.c_str()); }

DType parse_dtype(const std::string& text);  // ValueError for another name than that of a DType

// The global scale of x in the reciprocal convention, from the one of both arguments that is not None: `input_scale`
// (the factor that x is divided by) or the one named `name` (the factor that x is multiplied by, or 'dynamic': 0). 1
// where both are None.
float parse_input_scales(nb::handle input_scale, nb::handle global_scale, const char* name);

void bind_plan(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_functions(nb::module_& m);
void bind_activations(nb::module_& m);
void bind_native_weight(nb::module_& m);
void bind_xla(nb::module_& m);

nb::object plan_object(const Plan& plan, const PlanQuery& query);
std::string cuda_unavailable_reason();  // why a layer cannot be put on a GPU

}  // namespace fp4linear::python
