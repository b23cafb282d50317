# fp4linear._core, and the type stub that describes it.
find_package(nanobind CONFIG REQUIRED)

file(GLOB module_sources CONFIGURE_DEPENDS src/fp4linear/_core/*.cpp)
# Split mode: the compiled half of nanobind is the nanobind-backend package, so one file serves Python 3.10 and later.
nanobind_add_module(_core NB_SUPPRESS_WARNINGS BACKEND_MODULE nanobind_backend ${module_sources})
target_compile_definitions(_core PRIVATE FP4LINEAR_VERSION="${PROJECT_VERSION}")
target_link_libraries(_core PRIVATE fp4linear_core)
# The static CUDA runtime in here must not answer for another library's.
target_link_options(_core PRIVATE -Wl,--exclude-libs,ALL)

nanobind_add_stub(
    _core_stub
    MODULE _core
    OUTPUT _core.pyi
    PYTHON_PATH $<TARGET_FILE_DIR:_core>
    PATTERN_FILE "${PROJECT_SOURCE_DIR}/cmake/stub.pat"
    INCLUDE_PRIVATE
    DEPENDS _core)

install(TARGETS _core LIBRARY DESTINATION fp4linear)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/_core.pyi" DESTINATION fp4linear)
