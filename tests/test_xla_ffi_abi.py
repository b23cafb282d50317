"""The structures of XLA's FFI that the module declares, against the header that jaxlib ships: the compiler compares."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.abi import compile_check, header_of

pytestmark = pytest.mark.jax

OURS = Path(__file__).resolve().parents[1] / "src/fp4linear/_core/xla_ffi.h"

CHECK = """
#include <cstddef>
#include <type_traits>
#include THEIRS
#include OURS
namespace ours = fp4linear::xla_ffi;

#define SAME(A, a, B, b) \\
    static_assert(offsetof(ours::A, a) == offsetof(B, b) && sizeof(ours::A::a) == sizeof(B::b))
#define PREFIX(A, B) static_assert(sizeof(ours::A) <= sizeof(B) && alignof(ours::A) == alignof(B))

// Their names for the base of extensions and for the execution changed with API 0.4; pointers to them are pointers.
static_assert(offsetof(ours::Extension, type) == sizeof(std::size_t) && sizeof(ours::ExtensionType) == sizeof(int));
static_assert(int(ours::extension_metadata) == XLA_FFI_Extension_Metadata);
SAME(MetadataExtension, base, XLA_FFI_Metadata_Extension, extension_base);
SAME(MetadataExtension, metadata, XLA_FFI_Metadata_Extension, metadata);
PREFIX(Metadata, XLA_FFI_Metadata);
SAME(Metadata, version, XLA_FFI_Metadata, api_version);
SAME(Metadata, traits, XLA_FFI_Metadata, traits);
SAME(ApiVersion, major, XLA_FFI_Api_Version, major_version);
SAME(ApiVersion, minor, XLA_FFI_Api_Version, minor_version);
static_assert(ours::trait_command_buffer_compatible == XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
static_assert(ours::api_major == XLA_FFI_API_MAJOR && ours::oldest_api_minor <= XLA_FFI_API_MINOR);

static_assert(sizeof(ours::ErrorCreateArguments) == sizeof(XLA_FFI_Error_Create_Args));
SAME(ErrorCreateArguments, message, XLA_FFI_Error_Create_Args, message);
SAME(ErrorCreateArguments, code, XLA_FFI_Error_Create_Args, errc);
static_assert(sizeof(ours::ErrorDestroyArguments) == sizeof(XLA_FFI_Error_Destroy_Args));
SAME(ErrorDestroyArguments, error, XLA_FFI_Error_Destroy_Args, error);
static_assert(int(ours::error_invalid_argument) == XLA_FFI_Error_Code_INVALID_ARGUMENT);
static_assert(int(ours::error_resource_exhausted) == XLA_FFI_Error_Code_RESOURCE_EXHAUSTED);
static_assert(int(ours::error_internal) == XLA_FFI_Error_Code_INTERNAL);

static_assert(sizeof(ours::Buffer) == sizeof(XLA_FFI_Buffer));
SAME(Buffer, type, XLA_FFI_Buffer, dtype);
SAME(Buffer, data, XLA_FFI_Buffer, data);
SAME(Buffer, rank, XLA_FFI_Buffer, rank);
SAME(Buffer, dims, XLA_FFI_Buffer, dims);
static_assert(int(ours::type_u8) == XLA_FFI_DataType_U8);
static_assert(int(ours::type_s64) == XLA_FFI_DataType_S64 && int(ours::type_f16) == XLA_FFI_DataType_F16);
static_assert(int(ours::type_f32) == XLA_FFI_DataType_F32 && int(ours::type_bf16) == XLA_FFI_DataType_BF16);
static_assert(int(ours::kind_buffer) == XLA_FFI_ArgType_BUFFER && int(ours::kind_buffer) == XLA_FFI_RetType_BUFFER);
static_assert(int(ours::attribute_scalar) == XLA_FFI_AttrType_SCALAR);
static_assert(int(ours::attribute_string) == XLA_FFI_AttrType_STRING);

static_assert(sizeof(ours::ByteSpan) == sizeof(XLA_FFI_ByteSpan) && sizeof(ours::Scalar) == sizeof(XLA_FFI_Scalar));
SAME(ByteSpan, data, XLA_FFI_ByteSpan, ptr);
SAME(ByteSpan, size, XLA_FFI_ByteSpan, len);
SAME(Scalar, type, XLA_FFI_Scalar, dtype);
SAME(Scalar, value, XLA_FFI_Scalar, value);

static_assert(sizeof(ours::Values) == sizeof(XLA_FFI_Args) && sizeof(ours::Values) == sizeof(XLA_FFI_Rets));
SAME(Values, size, XLA_FFI_Args, size);
SAME(Values, kinds, XLA_FFI_Args, types);
SAME(Values, values, XLA_FFI_Args, args);
SAME(Values, size, XLA_FFI_Rets, size);
SAME(Values, kinds, XLA_FFI_Rets, types);
SAME(Values, values, XLA_FFI_Rets, rets);
static_assert(sizeof(ours::Attributes) == sizeof(XLA_FFI_Attrs));
SAME(Attributes, size, XLA_FFI_Attrs, size);
SAME(Attributes, kinds, XLA_FFI_Attrs, types);
SAME(Attributes, names, XLA_FFI_Attrs, names);
SAME(Attributes, values, XLA_FFI_Attrs, attrs);

PREFIX(CallFrame, XLA_FFI_CallFrame);
SAME(CallFrame, extensions, XLA_FFI_CallFrame, extension_start);
SAME(CallFrame, api, XLA_FFI_CallFrame, api);
SAME(CallFrame, execution, XLA_FFI_CallFrame, ctx);
SAME(CallFrame, stage, XLA_FFI_CallFrame, stage);
SAME(CallFrame, arguments, XLA_FFI_CallFrame, args);
SAME(CallFrame, results, XLA_FFI_CallFrame, rets);
SAME(CallFrame, attributes, XLA_FFI_CallFrame, attrs);
static_assert(int(ours::stage_execute) == XLA_FFI_ExecutionStage_EXECUTE);

static_assert(sizeof(ours::StreamGetArguments) == sizeof(XLA_FFI_Stream_Get_Args));
SAME(StreamGetArguments, execution, XLA_FFI_Stream_Get_Args, ctx);
SAME(StreamGetArguments, stream, XLA_FFI_Stream_Get_Args, stream);
PREFIX(Api, XLA_FFI_Api);
SAME(Api, version, XLA_FFI_Api, api_version);
SAME(Api, error_create, XLA_FFI_Api, XLA_FFI_Error_Create);
SAME(Api, error_destroy, XLA_FFI_Api, XLA_FFI_Error_Destroy);
SAME(Api, stream_get, XLA_FFI_Api, XLA_FFI_Stream_Get);
BROKEN
"""


def compare(tmp_path: Path, broken: str = "") -> subprocess.CompletedProcess[str]:
    theirs = header_of("jaxlib", "include/xla/ffi/api/c_api.h")
    if not theirs.is_file():
        pytest.skip("this jaxlib ships no header")
    return compile_check(tmp_path, CHECK, theirs, OURS, broken)


@pytest.mark.skipif(not OURS.is_file(), reason="the sources are not here")
def test_layouts_are_those_of_the_published_header(tmp_path: Path) -> None:
    done = compare(tmp_path)
    assert done.returncode == 0, done.stderr
    # The comparison can fail: two members that do not correspond.
    assert "static assertion" in compare(tmp_path, "SAME(Buffer, rank, XLA_FFI_Buffer, dims);").stderr
