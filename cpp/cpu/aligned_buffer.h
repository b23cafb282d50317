// Memory for weights, staged activations and panels: cache-line aligned, and on huge pages where large.
#pragma once
#include <cstddef>
#include <cstdint>

namespace fp4linear::cpu {

class AlignedBuffer {
   public:
    AlignedBuffer() = default;
    explicit AlignedBuffer(std::size_t bytes) { reserve(bytes); }
    ~AlignedBuffer();
    AlignedBuffer(const AlignedBuffer&) = delete;
    AlignedBuffer& operator=(const AlignedBuffer&) = delete;

    // At least `bytes` of uninitialised memory; what was held is lost where it has to grow. Throws std::bad_alloc.
    void reserve(std::size_t bytes);

    [[nodiscard]] std::size_t capacity() const { return capacity_; }
    [[nodiscard]] std::uint8_t* bytes() { return data_; }
    [[nodiscard]] const std::uint8_t* bytes() const { return data_; }
    template <class T>
    [[nodiscard]] T* as() {
        return reinterpret_cast<T*>(data_);
    }

   private:
    std::uint8_t* data_ = nullptr;
    std::size_t capacity_ = 0;
};

}  // namespace fp4linear::cpu
