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

}  // namespace fp4linear::dlpack
