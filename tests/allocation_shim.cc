// Preloaded into Python by test_allocation.py: the n-th allocation that this library makes fails. Only calls whose
// caller lies in its module, or which it makes through libstdc++ (operator new), count: what Python and NumPy do with a
// failing allocation is theirs.
#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<long> left{-1};
std::atomic<long> refused{0};

struct Range {
    std::uintptr_t begin = 0, end = 0;
} module;

int find_module(dl_phdr_info* info, std::size_t /*size*/, void* /*data*/) {
    const char* name = std::strrchr(info->dlpi_name, '/');
    if (name == nullptr || std::strncmp(name, "/_core.", 7) != 0 ||
        std::strstr(info->dlpi_name, "fp4linear") == nullptr)
        return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& segment = info->dlpi_phdr[i];
        if (segment.p_type != PT_LOAD || (segment.p_flags & PF_X) == 0) continue;
        module.begin = info->dlpi_addr + segment.p_vaddr;
        module.end = module.begin + segment.p_memsz;
    }
    return 1;
}

bool refuses(const void* caller) {
    if (left.load(std::memory_order_relaxed) < 0) return false;
    const auto address = reinterpret_cast<std::uintptr_t>(caller);
    if (address < module.begin || address >= module.end) return false;
    if (left.fetch_sub(1, std::memory_order_relaxed) != 0) return false;
    ++refused;
    return true;
}

void* get(std::size_t bytes, const void* caller) {
    if (refuses(caller)) throw std::bad_alloc();
    if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
    throw std::bad_alloc();
}

}  // namespace

extern "C" {

// The n-th allocation from here on fails; -1: none. Returns how many have failed so far, -1 without the module.
__attribute__((visibility("default"))) long fail_allocation(long n) {
    if (module.end == 0) dl_iterate_phdr(find_module, nullptr);
    left = n;
    return module.end == 0 ? -1 : refused.load();
}

__attribute__((visibility("default"))) int posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
    using Function = int (*)(void**, std::size_t, std::size_t);
    static const auto real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "posix_memalign"));
    return refuses(__builtin_return_address(0)) ? ENOMEM : real(memory, alignment, bytes);
}

}  // extern "C"

__attribute__((visibility("default"))) void* operator new(std::size_t bytes) {
    return get(bytes, __builtin_return_address(0));
}
__attribute__((visibility("default"))) void* operator new[](std::size_t bytes) {
    return get(bytes, __builtin_return_address(0));
}
__attribute__((visibility("default"))) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((visibility("default"))) void operator delete[](void* memory) noexcept { std::free(memory); }
__attribute__((visibility("default"))) void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
__attribute__((visibility("default"))) void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
