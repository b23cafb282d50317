"""The DLPack structures that the module declares, against the header that PyTorch ships: the compiler compares."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.abi import compile_check, header_of

pytestmark = pytest.mark.torch

OURS = Path(__file__).resolve().parents[1] / "src/fp4linear/_core/dlpack.h"

CHECK = """
#include <cstddef>
#include <type_traits>
#include THEIRS
#include OURS
namespace ours = fp4linear::dlpack;

template <class A, class B>
constexpr bool same_size = sizeof(A) == sizeof(B) && alignof(A) == alignof(B);
#define SAME(A, a, B, b) \\
    static_assert(offsetof(ours::A, a) == offsetof(B, b) && sizeof(ours::A::a) == sizeof(B::b))

static_assert(same_size<ours::Tensor, DLTensor>);
SAME(Tensor, data, DLTensor, data);
SAME(Tensor, device, DLTensor, device);
SAME(Tensor, ndim, DLTensor, ndim);
SAME(Tensor, dtype, DLTensor, dtype);
SAME(Tensor, shape, DLTensor, shape);
SAME(Tensor, strides, DLTensor, strides);
SAME(Tensor, byte_offset, DLTensor, byte_offset);
SAME(Device, type, DLDevice, device_type);
SAME(Device, id, DLDevice, device_id);
SAME(DataType, code, DLDataType, code);
SAME(DataType, bits, DLDataType, bits);
SAME(DataType, lanes, DLDataType, lanes);

static_assert(same_size<ours::ManagedTensor, DLManagedTensor>);
SAME(ManagedTensor, tensor, DLManagedTensor, dl_tensor);
SAME(ManagedTensor, context, DLManagedTensor, manager_ctx);
SAME(ManagedTensor, deleter, DLManagedTensor, deleter);

static_assert(same_size<ours::ManagedTensorVersioned, DLManagedTensorVersioned>);
SAME(ManagedTensorVersioned, version, DLManagedTensorVersioned, version);
SAME(ManagedTensorVersioned, context, DLManagedTensorVersioned, manager_ctx);
SAME(ManagedTensorVersioned, deleter, DLManagedTensorVersioned, deleter);
SAME(ManagedTensorVersioned, flags, DLManagedTensorVersioned, flags);
SAME(ManagedTensorVersioned, tensor, DLManagedTensorVersioned, dl_tensor);
static_assert(ours::flag_read_only == DLPACK_FLAG_BITMASK_READ_ONLY && ours::supported_major == DLPACK_MAJOR_VERSION);

static_assert(same_size<ours::ExchangeApi, DLPackExchangeAPI>);
SAME(ExchangeApiHeader, version, DLPackExchangeAPIHeader, version);
SAME(ExchangeApiHeader, previous, DLPackExchangeAPIHeader, prev_api);
SAME(ExchangeApi, allocate, DLPackExchangeAPI, managed_tensor_allocator);
SAME(ExchangeApi, managed_from_object, DLPackExchangeAPI, managed_tensor_from_py_object_no_sync);
SAME(ExchangeApi, object_from_managed, DLPackExchangeAPI, managed_tensor_to_py_object_no_sync);
SAME(ExchangeApi, tensor_from_object, DLPackExchangeAPI, dltensor_from_py_object_no_sync);
SAME(ExchangeApi, current_stream, DLPackExchangeAPI, current_work_stream);

static_assert(int(ours::cpu) == kDLCPU && int(ours::cuda) == kDLCUDA && int(ours::cuda_host) == kDLCUDAHost);
static_assert(int(ours::cuda_managed) == kDLCUDAManaged);
static_assert(int(ours::code_int) == kDLInt && int(ours::code_uint) == kDLUInt && int(ours::code_float) == kDLFloat);
static_assert(int(ours::code_bfloat) == kDLBfloat && int(ours::code_complex) == kDLComplex);
static_assert(int(ours::code_bool) == kDLBool && int(ours::code_float8_e4m3fn) == kDLFloat8_e4m3fn);
static_assert(int(ours::code_float8_e5m2) == kDLFloat8_e5m2 && int(ours::code_float8_e8m0fnu) == kDLFloat8_e8m0fnu);
static_assert(int(ours::code_float4_e2m1fn) == kDLFloat4_e2m1fn);
BROKEN
"""


def compare(tmp_path: Path, broken: str = "") -> subprocess.CompletedProcess[str]:
    theirs = header_of("torch", "include/ATen/dlpack.h")
    if not theirs.is_file() or "DLPackExchangeAPI" not in theirs.read_text():
        pytest.skip("this PyTorch ships no header of DLPack 1.3")
    return compile_check(tmp_path, CHECK, theirs, OURS, broken)


@pytest.mark.skipif(not OURS.is_file(), reason="the sources are not here")
def test_layouts_are_those_of_the_published_header(tmp_path: Path) -> None:
    done = compare(tmp_path)
    assert done.returncode == 0, done.stderr
    # The comparison can fail: two members that do not correspond.
    assert "static assertion" in compare(tmp_path, "SAME(Tensor, shape, DLTensor, strides);").stderr
