// A result on a GPU that no array library allocated: a DLPack producer that orders its consumer's stream behind the
// work.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "array.h"

namespace fp4linear::python {

// A fresh array [shape] of float16, bfloat16, float32 or uint8 on the current device, to be written on `stream`; *data
// is its memory.
nanobind::object make_device_array(const std::vector<std::int64_t>& shape, Element element, int device, void* stream,
                                   void** data);

void bind_device_array(nanobind::module_& m);

}  // namespace fp4linear::python
