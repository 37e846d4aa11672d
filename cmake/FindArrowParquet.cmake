# Finds Arrow C++ with its Parquet reader, 24 or newer: in the Python package pyarrow, or an installation of its own.
#
# Looked for, in this order:
#   LOCKSTEP_ARROW      (CMake variable, then environment) a pyarrow package, a virtual environment or an installation
#   CMAKE_PREFIX_PATH   (CMake variable, then environment) the same kinds of folder
#   ${PROJECT_SOURCE_DIR}/.venv, and the virtual environment that torch is in
#   find_package(Arrow) and find_package(Parquet), where the system has them
# Where LOCKSTEP_ARROW is set, nothing else is taken quietly instead.
# Defines ArrowParquet::parquet, ArrowParquet_DIR_FOUND (the wheel's folder; empty for an installation),
# ArrowParquet_VERSION and, when there is none, ArrowParquet_NOT_FOUND_MESSAGE.

set(_arrow_only NO_DEFAULT_PATH)
if(LOCKSTEP_ARROW)
  set(_arrow_roots "${LOCKSTEP_ARROW}")
elseif(DEFINED ENV{LOCKSTEP_ARROW} AND NOT "$ENV{LOCKSTEP_ARROW}" STREQUAL "")
  set(_arrow_roots "$ENV{LOCKSTEP_ARROW}")
else()
  set(_arrow_only "")
  string(REPLACE ":" ";" _arrow_env_prefixes "$ENV{CMAKE_PREFIX_PATH}")
  set(_arrow_roots ${CMAKE_PREFIX_PATH} ${_arrow_env_prefixes} "${PROJECT_SOURCE_DIR}/.venv")
  if(LibTorch_DIR_FOUND)
    list(APPEND _arrow_roots "${LibTorch_DIR_FOUND}/../pyarrow")
  endif()
endif()

set(ArrowParquet_DIR_FOUND "")
set(ArrowParquet_VERSION "")
foreach(_root IN LISTS _arrow_roots)
  file(GLOB _in_venv "${_root}/lib/python3*/site-packages/pyarrow")
  foreach(_candidate IN ITEMS "${_root}" "${_root}/pyarrow" ${_in_venv})
    # The wheel's libraries have their full names alone: libarrow.so.2600, with nothing that -larrow would find.
    file(GLOB _arrow_library "${_candidate}/libarrow.so.[0-9]*")
    file(GLOB _parquet_library "${_candidate}/libparquet.so.[0-9]*")
    list(LENGTH _arrow_library _arrow_libraries)
    list(LENGTH _parquet_library _parquet_libraries)
    if(NOT ArrowParquet_DIR_FOUND AND _arrow_libraries EQUAL 1 AND _parquet_libraries EQUAL 1
       AND EXISTS "${_candidate}/include/parquet/arrow/reader.h")
      get_filename_component(ArrowParquet_DIR_FOUND "${_candidate}" REALPATH)
      set(_arrow_wheel_libraries "${_parquet_library}" "${_arrow_library}")
    endif()
  endforeach()
endforeach()

set(_arrow_where "${ArrowParquet_DIR_FOUND}")
if(ArrowParquet_DIR_FOUND)
  file(STRINGS "${ArrowParquet_DIR_FOUND}/include/arrow/util/config.h" _arrow_version_line
    REGEX "#define ARROW_VERSION_STRING ")
  if(_arrow_version_line MATCHES "\"([0-9.]+)")
    set(ArrowParquet_VERSION "${CMAKE_MATCH_1}")
  endif()
else()
  find_package(Arrow CONFIG QUIET PATHS ${_arrow_roots} ${_arrow_only})
  find_package(Parquet CONFIG QUIET PATHS ${_arrow_roots} ${_arrow_only})
  if(TARGET Arrow::arrow_shared AND TARGET Parquet::parquet_shared)
    set(_arrow_where "${Parquet_DIR}")
    set(ArrowParquet_VERSION "${Arrow_VERSION}")
  endif()
endif()

if(_arrow_where)
  set(_arrow_reason "${_arrow_where} is Arrow ${ArrowParquet_VERSION}")
else()
  list(JOIN _arrow_roots ", " _arrow_reason)
  set(_arrow_reason "no Arrow C++ with Parquet in ${_arrow_reason}")
endif()
set(ArrowParquet_NOT_FOUND_MESSAGE "${_arrow_reason}. Install pyarrow ${ArrowParquet_FIND_VERSION} or newer beside torch, or set LOCKSTEP_ARROW to a pyarrow package, a virtual environment or an Arrow installation")
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(ArrowParquet
  REQUIRED_VARS _arrow_where
  VERSION_VAR ArrowParquet_VERSION
  REASON_FAILURE_MESSAGE "${ArrowParquet_NOT_FOUND_MESSAGE}")

if(ArrowParquet_FOUND AND NOT TARGET ArrowParquet::parquet)
  add_library(ArrowParquet::parquet INTERFACE IMPORTED)
  if(ArrowParquet_DIR_FOUND)
    target_include_directories(ArrowParquet::parquet SYSTEM INTERFACE "${ArrowParquet_DIR_FOUND}/include")
    target_link_libraries(ArrowParquet::parquet INTERFACE ${_arrow_wheel_libraries})
    target_link_options(ArrowParquet::parquet INTERFACE "-Wl,-rpath,${ArrowParquet_DIR_FOUND}")
  else()
    target_link_libraries(ArrowParquet::parquet INTERFACE Parquet::parquet_shared Arrow::arrow_shared)
  endif()
endif()
