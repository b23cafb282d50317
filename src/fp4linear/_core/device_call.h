// What calls on a GPU's arrays share: the stream of the caller, memory and arrays that live as long as it needs them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "array.h"
#include "cuda/weight.h"

namespace fp4linear::python {

// The stream of the argument: None, an integer (a cudaStream_t), or an object of the CUDA stream protocol.
std::optional<void*> parse_stream(nb::handle stream);

// Elements between the rows of x where its leading axes are evenly spaced and each row is contiguous and aligned;
// otherwise nothing, and x must be copied.
std::optional<std::int64_t> row_stride(const Array& x);

// Memory that lives as long as the work that was put on its stream.
class StreamMemory {
   public:
    explicit StreamMemory(void* stream) : stream_(stream) {}
    ~StreamMemory() { cuda::release(data_, stream_); }
    StreamMemory(const StreamMemory&) = delete;
    StreamMemory& operator=(const StreamMemory&) = delete;
    void* allocate(std::size_t bytes) { return data_ = cuda::allocate(bytes, stream_); }

   private:
    void* stream_;
    void* data_ = nullptr;
};

// Arrays that the stream still reads though their owner may free them at once: torch and CuPy reuse memory in the order
// of the stream that it was used on, others do not know this stream. They are let go by a later call, which holds the
// GIL.
class Retired {
   public:
    static void keep_until_reached(Array&& array, void* stream) {
        drop_reached();
        auto* kept = new Array(std::move(array));
        cuda::call_when_reached(stream, note, kept);
    }

   private:
    static void note(void* kept) {
        const std::lock_guard lock(instance().mutex_);
        instance().reached_.push_back(static_cast<Array*>(kept));
    }
    static void drop_reached() {
        std::vector<Array*> arrays;
        {
            const std::lock_guard lock(instance().mutex_);
            arrays.swap(instance().reached_);
        }
        for (Array* array : arrays) delete array;
    }
    static Retired& instance() {
        static auto* retired = new Retired;
        return *retired;
    }

    std::mutex mutex_;
    std::vector<Array*> reached_;
};

}  // namespace fp4linear::python
