// What launches and the planner need to know about a device, asked once.
#pragma once

namespace fp4linear::cuda {

struct DeviceFacts {
    int sm = 0;  // 10 * major + minor of the compute capability
    int sm_count = 0;
    int max_shared_memory = 0;  // bytes that a block may opt in to
    int kernel_arch = 0;        // that the loaded kernels were compiled for: 80 also where SM80 PTX runs on a newer GPU
    bool wgmma = false;         // they were compiled for sm_90a
    bool native = false;        // it loads kernels of native_nvfp4
};

// Makes the device's context.
const DeviceFacts& device_facts(int device);

}  // namespace fp4linear::cuda
