// The whole test framework of the core: count, say where and what, go on.
#pragma once
#include <cstdio>
#include <iostream>

namespace check {

inline long passed = 0;
inline long failed = 0;

inline void record(bool good, const char* file, int line, const char* text) {
    good ? ++passed : ++failed;
    if (!good) std::cerr << file << ":" << line << ": " << text << "\n";
}

template <class A, class B>
void record_equal(const A& a, const B& b, const char* file, int line, const char* text) {
    const bool good = a == b;
    good ? ++passed : ++failed;
    if (!good) std::cerr << file << ":" << line << ": " << text << ": " << a << " against " << b << "\n";
}

}  // namespace check

#define CHECK(condition) ::check::record(static_cast<bool>(condition), __FILE__, __LINE__, #condition)
#define CHECK_EQ(a, b) ::check::record_equal((a), (b), __FILE__, __LINE__, #a " == " #b)

// The last line of main: return check_report();
inline int check_report() {
    std::printf("%ld passed, %ld failed\n", ::check::passed, ::check::failed);
    return ::check::failed == 0 && ::check::passed > 0 ? 0 : 1;
}
