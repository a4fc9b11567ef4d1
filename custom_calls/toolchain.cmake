# Finds the compilers and jaxlib's headers. Afterwards either the languages CXX and CUDA
# are enabled and KDT_JAXLIB_INCLUDE_DIR, KDT_JAXLIB_VERSION are set, or KDT_OBSTACLE
# says in a line why the custom calls are not built.

set(KDT_CUDA ON CACHE STRING
  "ON: build the CUDA custom calls or fail; AUTO: build them if possible; OFF: do not")
set_property(CACHE KDT_CUDA PROPERTY STRINGS ON AUTO OFF)
set(KDT_REINSTALL "reinstall: pip install --force-reinstall --no-deps .")
set(KDT_OLDEST_NVCC 12.8)  # The first that knows sm_120.

macro(kdt_not_built reason)
  set(KDT_OBSTACLE "${reason}")
  if(KDT_CUDA STREQUAL "AUTO" OR NOT KDT_CUDA)
    message(STATUS "kdtree_jax: without CUDA custom calls: ${KDT_OBSTACLE}")
    return()
  endif()
  message(FATAL_ERROR "kdtree_jax: KDT_CUDA=${KDT_CUDA}, but ${KDT_OBSTACLE}")
endmacro()

if(NOT KDT_CUDA)
  kdt_not_built("the installation was told to leave them out (KDT_CUDA=${KDT_CUDA})")
endif()

# What the Python has for which the package is installed.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/locate.py
  OUTPUT_VARIABLE KDT_LOCATED COMMAND_ERROR_IS_FATAL ANY)
if(NOT KDT_LOCATED MATCHES "^([^;\n]*);?([^\n]*)\n([^\n]*)\n$")
  message(FATAL_ERROR "kdtree_jax: locate.py printed ${KDT_LOCATED}")
endif()
set(KDT_JAXLIB_VERSION "${CMAKE_MATCH_1}")
set(KDT_JAXLIB_INCLUDE_DIR "${CMAKE_MATCH_2}")
set(KDT_PIP_TOOLKIT "${CMAKE_MATCH_3}")

# nvcc: a named one, one on the PATH, or the one that jax[cuda13] brings along.
if(CMAKE_CUDA_COMPILER)
  set(KDT_NVCC "${CMAKE_CUDA_COMPILER}")
elseif(DEFINED ENV{CUDACXX})
  set(KDT_NVCC "$ENV{CUDACXX}")
else()
  find_program(KDT_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin
    NO_CMAKE_PATH NO_CMAKE_SYSTEM_PATH)
  if(NOT KDT_NVCC AND KDT_PIP_TOOLKIT)
    set(KDT_NVCC "${KDT_PIP_TOOLKIT}/bin/nvcc")
  endif()
endif()
if(NOT KDT_NVCC)
  kdt_not_built("no nvcc was found; install the CUDA toolkit or run pip install \
'jax[cuda13]' nvidia-cuda-cccl, then ${KDT_REINSTALL}")
endif()
execute_process(COMMAND ${KDT_NVCC} --version
  OUTPUT_VARIABLE KDT_NVCC_VERSION ERROR_QUIET RESULT_VARIABLE KDT_NVCC_STATUS)
if(NOT KDT_NVCC_VERSION MATCHES "release [0-9.]+, V([0-9.]+)")
  kdt_not_built("${KDT_NVCC} --version fails (${KDT_NVCC_STATUS})")
endif()
set(KDT_NVCC_VERSION "${CMAKE_MATCH_1}")
if(KDT_NVCC_VERSION VERSION_LESS KDT_OLDEST_NVCC)
  kdt_not_built("${KDT_NVCC} is version ${KDT_NVCC_VERSION}; ${KDT_OLDEST_NVCC} or \
later is needed, 13.0 or later advised")
endif()
if(NOT EXISTS "${KDT_JAXLIB_INCLUDE_DIR}/xla/ffi/api/ffi.h")
  kdt_not_built("${Python3_EXECUTABLE} has no jaxlib, whose headers are needed")
endif()

include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  kdt_not_built("no C++ compiler was found, which nvcc needs")
endif()
enable_language(CXX)

set(ENV{CUDACXX} "${KDT_NVCC}")
if(KDT_NVCC STREQUAL "${KDT_PIP_TOOLKIT}/bin/nvcc")
  # nvcc looks into lib64, pip's packages have lib. CMake links without nvcc later on.
  set(ENV{NVCC_APPEND_FLAGS} "$ENV{NVCC_APPEND_FLAGS} -L${KDT_PIP_TOOLKIT}/lib")
endif()
if(KDT_CUDA STREQUAL "AUTO")
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    kdt_not_built("${KDT_NVCC} cannot compile a test program with \
${CMAKE_CXX_COMPILER}; KDT_CUDA=ON shows the errors")
  endif()
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  # Real code only: PTX of an "a" target cannot be compiled for another chip.
  set(CMAKE_CUDA_ARCHITECTURES "90a-real;120-real" CACHE STRING "GPU architectures")
endif()
enable_language(CUDA)
# pip has what cuda_bf16.h includes in a package that jax[cuda13] does not ask for.
include(CheckSourceCompiles)
check_source_compiles(CUDA "#include <cuda_bf16.h>\nint main() {}" KDT_HAS_BF16)
if(NOT KDT_HAS_BF16)
  kdt_not_built("${KDT_NVCC} cannot compile cuda_bf16.h; it needs \
the header nv/target: pip install nvidia-cuda-cccl, then ${KDT_REINSTALL}")
endif()
message(STATUS "kdtree_jax: CUDA custom calls for ${CMAKE_CUDA_ARCHITECTURES}, \
nvcc ${KDT_NVCC_VERSION}, headers of jaxlib ${KDT_JAXLIB_VERSION}")
