// The structures of DLPack 1.x, as its specification lays them out (https://dmlc.github.io/dlpack/latest/c_api.html).
// tests/test_dlpack_abi.py checks them against the header that torch ships.
#pragma once
#include <cstdint>

namespace fp4linear::dlpack {

enum DeviceType : std::int32_t { cpu = 1, cuda = 2, cuda_host = 3, cuda_managed = 13 };

enum TypeCode : std::uint8_t {
    code_int = 0,
    code_uint = 1,
    code_float = 2,
    code_bfloat = 4,
    code_complex = 5,
    code_bool = 6,
    code_float8_e4m3fn = 10,
    code_float8_e5m2 = 12,
    code_float8_e8m0fnu = 14,
    code_float4_e2m1fn = 17,
};

struct Device {
    std::int32_t type;
    std::int32_t id;
};

struct DataType {
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
};

struct Tensor {
    void* data;
    Device device;
    std::int32_t ndim;
    DataType dtype;
    std::int64_t* shape;
    std::int64_t* strides;  // in elements; may be null for a C-contiguous tensor before DLPack 1.2
    std::uint64_t byte_offset;
};

struct ManagedTensor {
    Tensor tensor;
    void* context;
    void (*deleter)(ManagedTensor*);
};

struct Version {
    std::uint32_t major;
    std::uint32_t minor;
};

inline constexpr std::uint32_t supported_major = 1;
inline constexpr std::uint64_t flag_read_only = 1;

struct ManagedTensorVersioned {
    Version version;
    void* context;
    void (*deleter)(ManagedTensorVersioned*);
    std::uint64_t flags;
    Tensor tensor;
};

// The table of functions by which a framework lends tensors without Python calls (DLPack 1.3), in a capsule named
// "dlpack_exchange_api" at `__dlpack_c_exchange_api__` of the tensor type. None of them synchronises. They return 0, or
// set a Python error; the allocator reports through its callback instead.
struct ExchangeApiHeader {
    Version version;
    ExchangeApiHeader* previous;
};

struct ExchangeApi {
    ExchangeApiHeader header;
    int (*allocate)(Tensor* prototype, ManagedTensorVersioned** out, void* error_context,
                    void (*set_error)(void* error_context, const char* kind, const char* message));
    int (*managed_from_object)(void* object, ManagedTensorVersioned** out);
    int (*object_from_managed)(ManagedTensorVersioned* tensor, void** out_object);
    int (*tensor_from_object)(void* object, Tensor* out);  // may be null; borrows
    int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** out_stream);
};

}  // namespace fp4linear::dlpack
