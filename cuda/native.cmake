# The kernels of native_nvfp4, where the targets name a Blackwell GPU and CUTLASS is there. Each family is compiled for its
# own family target alone: "f" runs on all of a family's members (12.0 and 12.1; 10.0 and 10.3), "a" on one, and a plain
# sm_120 compiles into a kernel that multiplies nothing.
set_property(GLOBAL APPEND PROPERTY JOB_POOLS cutlass=1)  # up to 7.4 GB each while it compiles
set(kind f)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.9)  # which came with family targets: 12.0 and 10.0 alone before
    set(kind a)
endif()
foreach(family IN ITEMS 120 100)
    string(SUBSTRING ${family} 0 2 members)
    set(wanted ${FP4LINEAR_CUDA_TARGETS})
    list(FILTER wanted INCLUDE REGEX "^${members}[0-9][af](-real)?$")
    if(NOT wanted)
        continue()
    endif()
    if(NOT TARGET fp4linear_cutlass_headers)
        message(STATUS "fp4linear: no native NVFP4 kernels for sm_${family}: CUTLASS was not found (third_party/README.md)")
        continue()
    endif()
    set(native fp4linear_native_sm${family})
    add_library(${native} OBJECT native_nvfp4_sm${family}.cu)
    set_target_properties(${native} PROPERTIES CUDA_ARCHITECTURES OFF CUDA_VISIBILITY_PRESET hidden
                                               JOB_POOL_COMPILE cutlass)
    target_include_directories(${native} PRIVATE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/cpp")
    target_link_libraries(${native} PRIVATE fp4linear_cutlass_headers)
    # 2908: CUTLASS 4.2 captures this in lambdas in a way that C++20 deprecates.
    target_compile_options(
        ${native} PRIVATE -gencode=arch=compute_${family}${kind},code=sm_${family}${kind} --expt-relaxed-constexpr
                          -diag-suppress=2908 --compress-mode=size)
    target_sources(fp4linear_cuda PRIVATE $<TARGET_OBJECTS:${native}>)
    target_compile_definitions(fp4linear_cuda PRIVATE FP4LINEAR_NATIVE_SM${family})
    message(STATUS "fp4linear: native NVFP4 kernels for sm_${family}${kind}")
endforeach()
if(TARGET fp4linear_cutlass_headers)
    target_compile_definitions(fp4linear_cuda PRIVATE FP4LINEAR_CUTLASS)
endif()
