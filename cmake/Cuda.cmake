# Sets FP4LINEAR_BUILD_CUDA and, where it is true, enables the CUDA language for FP4LINEAR_CUDA_TARGETS.
# The decision itself is build_backend/cuda_toolchain.py's, which the build backend asks too.
execute_process(
    COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/build_backend/cuda_toolchain.py"
            "--mode=${FP4LINEAR_CUDA}" "--architectures=${FP4LINEAR_CUDA_ARCHITECTURES}"
    OUTPUT_VARIABLE answer
    ERROR_VARIABLE problem
    RESULT_VARIABLE status)
if(NOT status EQUAL 0)
    message(FATAL_ERROR "${problem}")
endif()

foreach(key IN ITEMS build reason architectures nvcc wheel_root compiler)
    string(REGEX MATCH "(^|\n)${key}=([^\n]*)" ignored "${answer}")
    set(cuda_${key} "${CMAKE_MATCH_2}")
endforeach()
set(FP4LINEAR_BUILD_CUDA ${cuda_build})

if(NOT FP4LINEAR_BUILD_CUDA)
    message(STATUS "fp4linear: building for the CPU only (${cuda_reason})")
    return()
endif()
message(STATUS "fp4linear: building CUDA for ${cuda_architectures} (${cuda_reason}) with ${cuda_compiler}")

if(CMAKE_CUDA_COMPILER AND NOT "${CMAKE_CUDA_COMPILER}" STREQUAL "${cuda_nvcc}")
    message(FATAL_ERROR "This build tree was made with ${CMAKE_CUDA_COMPILER}: remove it to build with ${cuda_nvcc}")
endif()
if(cuda_wheel_root)
    # The wheels' nvcc.profile names lib64, which they don't have, and FindCUDAToolkit wants an unversioned libcudart.
    set(ENV{NVCC_APPEND_FLAGS} "$ENV{NVCC_APPEND_FLAGS} -L${cuda_wheel_root}/lib")
    set(CUDA_CUDART "${cuda_wheel_root}/lib/libcudart.so.13" CACHE FILEPATH "read by FindCUDAToolkit; we link the static one")
endif()
set(CMAKE_CUDA_COMPILER "${cuda_nvcc}" CACHE FILEPATH "nvcc")
set(CMAKE_CUDA_ARCHITECTURES "${cuda_architectures}")
set(FP4LINEAR_CUDA_TARGETS "${cuda_architectures}")
enable_language(CUDA)
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25.1 does not know that nvcc has C++20
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
find_package(CUDAToolkit REQUIRED)
