// A result on a GPU that no array library allocated: a DLPack producer that orders its consumer's stream behind the
// work.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace fp4linear::python {

// A fresh 16-bit array [shape] on the current device, to be written on `stream`; *data is its memory.
nanobind::object make_device_array(const std::vector<std::int64_t>& shape, bool bfloat16, int device, void* stream,
                                   void** data);

void bind_device_array(nanobind::module_& m);

}  // namespace fp4linear::python
