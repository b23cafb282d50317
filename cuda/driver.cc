// What the driver says about this machine, asked through libcuda.so.1 itself: the CUDA runtime would make a context
// for some of it, and linking libcuda would make the module need a driver to load.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <stdexcept>
#include <string>

#include "cuda/backend.h"

namespace fp4linear::cuda {

namespace {

struct Driver {
    decltype(&cuInit) init = nullptr;
    decltype(&cuDriverGetVersion) driver_get_version = nullptr;
    decltype(&cuGetErrorName) get_error_name = nullptr;
    decltype(&cuDeviceGetCount) device_get_count = nullptr;
    decltype(&cuDeviceGetName) device_get_name = nullptr;
    decltype(&cuDeviceGetAttribute) device_get_attribute = nullptr;
    decltype(&cuDeviceTotalMem) device_total_mem = nullptr;
    std::string problem;  // why no device can be used; empty where they can
    int devices = 0;
};

std::string version_text(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string failed(const Driver& driver, const char* call, CUresult status) {
    const char* name = nullptr;
    if (driver.get_error_name(status, &name) != CUDA_SUCCESS) name = "unknown error";
    return std::string(call) + " failed: " + name;
}

template <class Function>
bool load(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
}

// The names are those that cuda.h maps the functions to.
bool load_all(void* library, Driver& driver) {
    return load(library, "cuInit", driver.init) && load(library, "cuDriverGetVersion", driver.driver_get_version) &&
           load(library, "cuGetErrorName", driver.get_error_name) &&
           load(library, "cuDeviceGetCount", driver.device_get_count) &&
           load(library, "cuDeviceGetName", driver.device_get_name) &&
           load(library, "cuDeviceGetAttribute", driver.device_get_attribute) &&
           load(library, "cuDeviceTotalMem_v2", driver.device_total_mem);
}

Driver open_driver() {
    Driver driver;
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        driver.problem = "no NVIDIA driver: libcuda.so.1 can't be loaded";
        return driver;
    }
    if (!load_all(library, driver)) {
        driver.problem = "libcuda.so.1 lacks functions of CUDA " + version_text(CUDART_VERSION);
        return driver;
    }
    if (const CUresult status = driver.init(0); status != CUDA_SUCCESS) {
        driver.problem = failed(driver, "cuInit(0)", status);
        return driver;
    }
    int version = 0;
    driver.driver_get_version(&version);
    // A driver runs every minor release of its own major version of CUDA, and older ones.
    if (version / 1000 < CUDART_VERSION / 1000) {
        driver.problem = "the driver supports CUDA " + version_text(version) + ", this build needs CUDA " +
                         std::to_string(CUDART_VERSION / 1000);
        return driver;
    }
    if (const CUresult status = driver.device_get_count(&driver.devices); status != CUDA_SUCCESS) {
        driver.devices = 0;
        driver.problem = failed(driver, "cuDeviceGetCount", status);
    } else if (driver.devices == 0) {
        driver.problem = "the driver shows no device (CUDA_VISIBLE_DEVICES may hide them)";
    }
    return driver;
}

const Driver& driver() {
    static const Driver opened = open_driver();
    return opened;
}

int attribute(const Driver& driver, CUdevice_attribute which, int device) {
    int value = 0;
    if (const CUresult status = driver.device_get_attribute(&value, which, device); status != CUDA_SUCCESS)
        throw std::runtime_error(failed(driver, "cuDeviceGetAttribute", status));
    return value;
}

}  // namespace

int device_count() { return driver().devices; }
std::string no_device_reason() { return driver().problem; }

DeviceInfo device_info(int device) {
    const Driver& here = driver();
    if (device < 0 || device >= here.devices)
        throw std::runtime_error("CUDA device " + std::to_string(device) + ": this machine has " +
                                 std::to_string(here.devices) +
                                 (here.problem.empty() ? std::string() : " (" + here.problem + ")"));
    DeviceInfo info;
    std::array<char, 256> name{};
    if (const CUresult status = here.device_get_name(name.data(), name.size(), device); status != CUDA_SUCCESS)
        throw std::runtime_error(failed(here, "cuDeviceGetName", status));
    if (const CUresult status = here.device_total_mem(&info.memory, device); status != CUDA_SUCCESS)
        throw std::runtime_error(failed(here, "cuDeviceTotalMem", status));
    info.name = name.data();
    info.sm = 10 * attribute(here, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) +
              attribute(here, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
    info.sm_count = attribute(here, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    return info;
}

}  // namespace fp4linear::cuda
