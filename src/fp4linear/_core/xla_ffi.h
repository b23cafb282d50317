// The structures of XLA's foreign function interface (API 0.1 to 0.4) that a handler reads, as its public header
// xla/ffi/api/c_api.h lays them out. tests/test_xla_ffi_abi.py checks them against the header that jaxlib ships. A
// struct may grow at its end in a later minor version, so nothing here is created by us but what the API takes.
#pragma once
#include <cstddef>
#include <cstdint>

namespace fp4linear::xla_ffi {

inline constexpr int api_major = 0;
inline constexpr int oldest_api_minor = 1;  // jaxlib 0.5.0

enum ExtensionType : std::int32_t { extension_metadata = 1 };

struct Extension {
    std::size_t struct_size;
    ExtensionType type;
    Extension* next;
};

struct ApiVersion {
    std::size_t struct_size;
    Extension* extensions;
    int major;
    int minor;
};

enum ErrorCode : std::int32_t {
    error_invalid_argument = 3,
    error_resource_exhausted = 8,
    error_internal = 13,
};
struct Error;  // XLA's

struct ErrorCreateArguments {
    std::size_t struct_size;
    Extension* extensions;
    const char* message;
    ErrorCode code;
};

struct ErrorDestroyArguments {
    std::size_t struct_size;
    Extension* extensions;
    Error* error;
};

enum DataType : std::int32_t {
    type_u8 = 6,
    type_s64 = 5,
    type_f16 = 10,
    type_f32 = 11,
    type_bf16 = 16,
};

struct Buffer {
    std::size_t struct_size;
    Extension* extensions;
    DataType type;
    void* data;
    std::int64_t rank;
    std::int64_t* dims;
};

enum ValueKind : std::int32_t { kind_buffer = 1 };  // of arguments and of results
enum AttributeKind : std::int32_t { attribute_scalar = 3, attribute_string = 4 };

struct ByteSpan {
    const char* data;
    std::size_t size;
};

struct Scalar {
    DataType type;
    void* value;
};

struct Execution;  // XLA's

enum Stage : std::int32_t { stage_execute = 3 };

struct Values {  // arguments, or results
    std::size_t struct_size;
    Extension* extensions;
    std::int64_t size;
    ValueKind* kinds;
    void** values;
};

struct Attributes {
    std::size_t struct_size;
    Extension* extensions;
    std::int64_t size;
    AttributeKind* kinds;
    ByteSpan** names;  // sorted
    void** values;
};

struct StreamGetArguments {
    std::size_t struct_size;
    Extension* extensions;
    Execution* execution;
    void* stream;  // out: on CUDA a CUstream
};

struct Api {
    std::size_t struct_size;
    Extension* extensions;
    ApiVersion version;
    const void* internal;
    Error* (*error_create)(ErrorCreateArguments*);
    void* error_get_message;
    void (*error_destroy)(ErrorDestroyArguments*);
    void* handler_register;
    Error* (*stream_get)(StreamGetArguments*);
};

struct CallFrame {
    std::size_t struct_size;
    Extension* extensions;
    const Api* api;  // null where metadata are asked for
    Execution* execution;
    Stage stage;
    Values arguments;
    Values results;
    Attributes attributes;
};

// The call's work may be captured into a CUDA graph and replayed.
inline constexpr std::uint32_t trait_command_buffer_compatible = 1;

struct Metadata {
    std::size_t struct_size;
    ApiVersion version;
    std::uint32_t traits;
};

struct MetadataExtension {
    Extension base;
    Metadata* metadata;
};

using Handler = Error*(CallFrame*);

}  // namespace fp4linear::xla_ffi
