// A layer's weight on one GPU, and the paths that read it: what the core needs of the backend, with no CUDA headers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "formats/swizzle.h"
#include "plan.h"
#include "problem.h"

namespace fp4linear::cuda {

// Host arrays, C-contiguous, only read during construction.
struct WeightArguments {
    std::int64_t n = 0, k = 0;
    int block_size = 16;
    const std::uint8_t* b = nullptr;             // [n, k/2]
    const std::uint8_t* scales = nullptr;        // [n, ceil(k/block_size)]
    const std::vector<float>* scale2 = nullptr;  // one, or n
    const std::vector<float>* bias = nullptr;    // none, or n
    int device = 0;
    WeightForm form = WeightForm::canonical;
    bool native = false;  // what native_nvfp4 reads too (formats/native_weight.h)
};

// Immutable; safe to read from any thread and stream once it is made.
class Weight {
   public:
    virtual ~Weight() = default;
    virtual void canonical(std::uint8_t* b, std::uint8_t* scales) const = 0;  // to host memory; synchronises
    [[nodiscard]] virtual std::size_t nbytes() const = 0;
};

// The form that a layer on this device should hold: prepacked where a path that reads it can run.
WeightForm choose_form(std::int64_t k, int block_size, bool has_nan_scales, const DeviceSpec& device,
                       const Options& options);

// Should it hold what native_nvfp4 reads beside that? Where the path is wanted and can run.
bool wants_native(std::int64_t n, std::int64_t k, int block_size, const DeviceSpec& device, const Options& options);

std::unique_ptr<Weight> make_weight(const WeightArguments& arguments);  // synchronises once

// formats/native_weight.h by the kernels that make_weight() runs, for host pointers: uploads, runs on the device,
// downloads. by_prepacked: the scales come from the prepacked form, which K must allow.
void native_weight_host(const std::uint8_t* b, const std::uint8_t* scales, std::int64_t n, std::int64_t k,
                        bool by_prepacked, std::uint8_t* codes, std::uint8_t* swizzled, int device);

DeviceSpec device_spec(int device);  // what the planner asks; cheap

struct CallOptions {
    int rows_per_block = 1;           // gemv_scalar: rows of x that share a weight load
    bool batch_invariant = false;     // the bits of a row of y depend on that row of x alone
    float input_global_scale = 1.0f;  // native paths: what x is multiplied by; 0: 2688 / amax of this call's x
};

// Enqueues one call on a stream (a cudaStream_t) of the weight's device. No allocation in steady state, no
// synchronisation; may be captured.
void run(PathId path, const Weight& weight, const Problem& problem, const CallOptions& options, void* stream);

// out [count, k] float16 or bfloat16: e2m1 * e4m3 of rows [first, first + count), exact. scale2 [count], or null: the
// global scales of these rows, where the weight has one a row. Asynchronous, may be captured.
void dequantize_rows(const Weight& weight, std::int64_t first, std::int64_t count, DType dtype, void* out,
                     float* scale2, void* stream);

// y for K = 0: every row is the bias, or zeros.
void fill_with_bias(const Weight& weight, const Problem& problem, void* stream);

// x of the problem (m, k, dtype, x, x_row_stride; any stride, aligned to its elements; k even) as NVFP4, the bits of
// cpu::quantize_activations(): codes [m, k/2], scales in the layout (swizzled ones at a multiple of 4 bytes) and the
// global scale. All on the device. global_scale: 0 takes the dynamic one. Asynchronous, may be captured.
void quantize_activations(const Problem& problem, float global_scale, ScaleLayout layout, std::uint8_t* codes,
                          std::uint8_t* scales, float* global_scale_out, void* stream);

// Copies a strided 16-bit array to C-contiguous memory, on the stream. strides in bytes; at most 8 axes.
void gather(void* to, const void* from, int ndim, const std::int64_t* shape, const std::int64_t* strides, void* stream);

int current_device();  // of the calling thread

// Makes a device current for the calling thread and puts the previous one back.
class CurrentDevice {
   public:
    explicit CurrentDevice(int device);
    ~CurrentDevice();
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;

   private:
    [[maybe_unused]] int previous_ = -1;
};

// The library's own stream on a device, for callers whose current stream is not known. Never destroyed.
void* own_stream(int device);

// Work put on `later` from now on waits for all that is on `earlier` now. Both belong to the current device.
void order(void* earlier, void* later);

// Stream-ordered device memory, for results that no array library allocates.
void* allocate(std::size_t bytes, void* stream);
void release(void* memory, void* stream) noexcept;

// Calls a function on a thread of the driver once the stream has got there. It may call no CUDA function.
void call_when_reached(void* stream, void (*function)(void*), void* argument);

bool cublaslt_available();  // loads the library where it can be found by its soname

// Copies between host and device (cudaMemcpyDefault), on the legacy stream, synchronously.
void copy(void* to, const void* from, std::size_t bytes);

}  // namespace fp4linear::cuda
