#include "cpu/aligned_buffer.h"

#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fp4linear::cpu {
namespace {

constexpr std::size_t cache_line_bytes = 64;
constexpr std::size_t huge_page_bytes = std::size_t{1} << 21;  // x86-64 and aarch64 with 4 KiB base pages

}  // namespace

AlignedBuffer::~AlignedBuffer() { std::free(data_); }

void AlignedBuffer::reserve(std::size_t bytes) {
    if (bytes <= capacity_) return;
    std::free(data_);
    data_ = nullptr;
    capacity_ = 0;
    // A stream over 4 KiB pages stops the hardware prefetchers at each page and walks the TLB for it.
    const bool huge = bytes >= 2 * huge_page_bytes;
    const std::size_t alignment = huge ? huge_page_bytes : cache_line_bytes;
    const std::size_t rounded = (bytes + cache_line_bytes - 1) / cache_line_bytes * cache_line_bytes;
    void* memory = nullptr;
    if (rounded < bytes || posix_memalign(&memory, alignment, rounded) != 0) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (huge) madvise(memory, rounded, MADV_HUGEPAGE);  // a hint: failure costs only speed
#endif
    data_ = static_cast<std::uint8_t*>(memory);
    capacity_ = rounded;
}

}  // namespace fp4linear::cpu
