# Finds LibTorch: the Python package "torch" or an unpacked libtorch zip, CPU or CUDA build, 2.11 or newer.
#
# find_package(Torch) is not used: on the Python wheel it fails without a CUDA toolkit.
#
# Looked for, in this order:
#   LOCKSTEP_TORCH      (CMake variable, then environment) a torch package, a libtorch folder or a virtual environment
#   LibTorch_HINTS      set by an installed Lockstep: the torch that it was built with
#   CMAKE_PREFIX_PATH   (CMake variable, then environment) the same kinds of folder
#   ${PROJECT_SOURCE_DIR}/.venv
# The first that holds a torch is taken; if it is too old, that is an error, and no other is taken quietly instead.
# Defines LibTorch::torch, LibTorch_DIR_FOUND, LibTorch_VERSION and LibTorch_HAS_CUDA, and for a CUDA build whose CUDA and
# NCCL headers are at hand LibTorch::cuda. The wheel has them in the packages "nvidia-*" beside it, so no toolkit is needed;
# for an unpacked libtorch they come from CUDAToolkit_ROOT, CUDA_HOME, /usr/local/cuda or the system. Where they are
# missing, or libraries that torch's CUDA part loads are, as after scripts/quickstart without a card, LibTorch_CUDA_MISSING
# names them.

set(_libtorch_roots "")
if(LOCKSTEP_TORCH)
  list(APPEND _libtorch_roots "${LOCKSTEP_TORCH}")
elseif(DEFINED ENV{LOCKSTEP_TORCH} AND NOT "$ENV{LOCKSTEP_TORCH}" STREQUAL "")
  list(APPEND _libtorch_roots "$ENV{LOCKSTEP_TORCH}")
else()
  string(REPLACE ":" ";" _libtorch_env_prefixes "$ENV{CMAKE_PREFIX_PATH}")
  list(APPEND _libtorch_roots ${LibTorch_HINTS} ${CMAKE_PREFIX_PATH} ${_libtorch_env_prefixes} "${PROJECT_SOURCE_DIR}/.venv")
endif()

set(LibTorch_DIR_FOUND "")
foreach(_root IN LISTS _libtorch_roots)
  file(GLOB _in_venv "${_root}/lib/python3*/site-packages/torch")
  get_filename_component(_two_up "${_root}/../.." ABSOLUTE)  # torch.utils.cmake_prefix_path is torch/share/cmake
  foreach(_candidate IN ITEMS "${_root}" "${_root}/torch" "${_root}/libtorch" ${_in_venv} "${_two_up}")
    if(NOT LibTorch_DIR_FOUND AND EXISTS "${_candidate}/lib/libtorch_cpu.so"
       AND EXISTS "${_candidate}/include/torch/csrc/distributed/c10d/Backend.hpp")
      get_filename_component(LibTorch_DIR_FOUND "${_candidate}" REALPATH)
    endif()
  endforeach()
endforeach()

if(LibTorch_DIR_FOUND)
  set(_version_header "${LibTorch_DIR_FOUND}/include/torch/headeronly/version.h")
  if(NOT EXISTS "${_version_header}")
    set(_version_header "${LibTorch_DIR_FOUND}/include/torch/csrc/api/include/torch/version.h")
  endif()
  set(_version_lines "")
  if(EXISTS "${_version_header}")
    file(STRINGS "${_version_header}" _version_lines REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  endif()
  if(_version_lines MATCHES "MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+)")
    set(LibTorch_VERSION "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3}")
  else()
    set(LibTorch_VERSION "0")  # so old, or so new, that its version stands elsewhere
  endif()
  if(EXISTS "${LibTorch_DIR_FOUND}/lib/libtorch_cuda.so")
    set(LibTorch_HAS_CUDA TRUE)
  else()
    set(LibTorch_HAS_CUDA FALSE)
  endif()
endif()

if(LibTorch_DIR_FOUND)
  set(_libtorch_reason "${LibTorch_DIR_FOUND} is torch ${LibTorch_VERSION}")
else()
  list(JOIN _libtorch_roots ", " _libtorch_reason)
  set(_libtorch_reason "no torch with C++ headers in ${_libtorch_reason}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_DIR_FOUND
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "${_libtorch_reason}. Set LOCKSTEP_TORCH to a torch package, a libtorch folder or a virtual environment with torch ${LibTorch_FIND_VERSION} or newer")

if(LibTorch_FOUND AND NOT TARGET LibTorch::torch)
  add_library(LibTorch::torch INTERFACE IMPORTED)
  target_include_directories(LibTorch::torch SYSTEM INTERFACE
    "${LibTorch_DIR_FOUND}/include" "${LibTorch_DIR_FOUND}/include/torch/csrc/api/include")
  target_link_libraries(LibTorch::torch INTERFACE
    "${LibTorch_DIR_FOUND}/lib/libtorch_cpu.so" "${LibTorch_DIR_FOUND}/lib/libc10.so")
  # The CUDA build's libtorch_cpu.so leaves symbols to libraries that a CPU program never loads.
  target_link_options(LibTorch::torch INTERFACE
    "-Wl,--allow-shlib-undefined" "$<$<NOT:$<BOOL:${SKBUILD}>>:-Wl,-rpath,${LibTorch_DIR_FOUND}/lib>")
  # c10d's headers select the Gloo and NCCL parts by macros; nothing of Lockstep's core sees them.
  target_compile_definitions(LibTorch::torch INTERFACE USE_DISTRIBUTED USE_C10D)
endif()

if(LibTorch_FOUND AND LibTorch_HAS_CUDA AND NOT TARGET LibTorch::cuda)
  # CUDA 13's wheels have one folder (nvidia/cu13), those of CUDA 12 one for each part (nvidia/cuda_runtime, nvidia/cublas).
  file(GLOB _cuda_wheel_includes "${LibTorch_DIR_FOUND}/../nvidia/*/include")
  file(GLOB _cuda_wheel_libraries "${LibTorch_DIR_FOUND}/../nvidia/*/lib")
  set(_cuda_roots "${CUDAToolkit_ROOT}" "$ENV{CUDAToolkit_ROOT}" "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}" /usr/local/cuda)
  list(FILTER _cuda_roots EXCLUDE REGEX "^$")
  set(LibTorch_CUDA_MISSING "")
  # A library that can't be loaded is of no use, whatever headers there are.
  execute_process(COMMAND ldd "${LibTorch_DIR_FOUND}/lib/libtorch_cuda.so" OUTPUT_VARIABLE _cuda_libraries ERROR_QUIET)
  string(REGEX MATCHALL "[^ \t\n]+ => not found" _cuda_libraries "${_cuda_libraries}")
  foreach(_library IN LISTS _cuda_libraries)
    string(REPLACE " => not found" "" _library "${_library}")
    if(NOT _library STREQUAL "libcuda.so.1")  # the driver's
      list(APPEND LibTorch_CUDA_MISSING "${_library}")
    endif()
  endforeach()
  set(_cuda_includes "")
  # ATen's and c10d's headers for CUDA include all of these.
  foreach(_header IN ITEMS cuda_runtime_api.h cublas_v2.h cublasLt.h cusparse.h cusolverDn.h nccl.h)
    unset(_cuda_include)
    find_path(_cuda_include "${_header}" PATHS ${_cuda_wheel_includes} NO_DEFAULT_PATH NO_CACHE)
    find_path(_cuda_include "${_header}" HINTS ${_cuda_roots} PATH_SUFFIXES include targets/x86_64-linux/include NO_CACHE)
    if(_cuda_include)
      list(APPEND _cuda_includes "${_cuda_include}")
    else()
      list(APPEND LibTorch_CUDA_MISSING "${_header}")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES _cuda_includes)
  # The wheels' library has its full name alone: libcudart.so.13; libtorch's zip has libcudart-HASH.so.12 among torch's own.
  unset(_cudart)
  foreach(_folder IN LISTS _cuda_wheel_libraries ITEMS "${LibTorch_DIR_FOUND}/lib")
    file(GLOB _candidates "${_folder}/libcudart.so*" "${_folder}/libcudart-*.so*")
    if(NOT _cudart AND _candidates)
      list(GET _candidates 0 _cudart)
    endif()
  endforeach()
  if(NOT _cudart)
    find_library(_cudart cudart HINTS ${_cuda_roots} PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib NO_CACHE)
  endif()
  if(NOT _cudart)
    list(APPEND LibTorch_CUDA_MISSING "libcudart.so")
  endif()
  if(NOT LibTorch_CUDA_MISSING)
    get_filename_component(_cudart_folder "${_cudart}" DIRECTORY)
    get_filename_component(_cudart_folder "${_cudart_folder}" REALPATH)
    add_library(LibTorch::cuda INTERFACE IMPORTED)
    target_include_directories(LibTorch::cuda SYSTEM INTERFACE ${_cuda_includes})
    target_link_libraries(LibTorch::cuda INTERFACE LibTorch::torch
      "${LibTorch_DIR_FOUND}/lib/libtorch_cuda.so" "${LibTorch_DIR_FOUND}/lib/libc10_cuda.so" "${_cudart}")
    target_link_options(LibTorch::cuda INTERFACE "-Wl,-rpath,${_cudart_folder}")
    target_compile_definitions(LibTorch::cuda INTERFACE USE_CUDA USE_C10D_NCCL)
  else()
    list(JOIN LibTorch_CUDA_MISSING ", " LibTorch_CUDA_MISSING)
  endif()
endif()
