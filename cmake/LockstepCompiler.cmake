# The compiler's settings for every target: C++20, warnings as errors, sanitizers, ccache and mold where present.

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET default)

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11)
  message(FATAL_ERROR "Lockstep needs g++ 11 or newer (found ${CMAKE_CXX_COMPILER_VERSION}); set CXX to a newer compiler")
endif()

find_program(LOCKSTEP_CCACHE ccache)
if(LOCKSTEP_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Paths are relative to the base folder, and so are those in batches, so that what one checkout has compiled is found by
  # another one. The sloppiness is what ccache asks for with precompiled headers.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${LOCKSTEP_CCACHE})
  set(CMAKE_UNITY_BUILD_RELOCATABLE ON)
endif()
find_program(LOCKSTEP_MOLD mold)
if(LOCKSTEP_MOLD)
  add_link_options(-fuse-ld=mold)
endif()

add_compile_options(-Wall -Wextra -Werror -fno-math-errno)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Precompiled headers of ccache and GCC need it; and GCC 12 warns wrongly about inlined standard containers.
  add_compile_options(-fpch-preprocess -Wno-stringop-overflow -Wno-array-bounds -Wno-restrict -Wno-maybe-uninitialized -Wno-dangling-pointer)
  # In a batch of files (LockstepBatches.cmake) a class's private parts look as if they stood in a header.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
endif()

if(LOCKSTEP_SANITIZER STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize=vptr -fno-omit-frame-pointer)
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    # As GCC does. C libraries that are loaded at run time have declared their structures themselves.
    add_compile_options(-D__SANITIZE_ADDRESS__=1 -Wno-builtin-macro-redefined -fno-sanitize=function)
  endif()
  add_link_options(-fsanitize=address,undefined)
elseif(LOCKSTEP_SANITIZER STREQUAL "thread")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer)
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    add_compile_options(-D__SANITIZE_THREAD__=1 -Wno-builtin-macro-redefined)  # as GCC does
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-Wno-tsan)  # GCC does not instrument fences; each fence of ours also has atomics that order it.
  endif()
  add_link_options(-fsanitize=thread)
elseif(LOCKSTEP_SANITIZER)
  message(FATAL_ERROR "LOCKSTEP_SANITIZER is '${LOCKSTEP_SANITIZER}'; it takes address, thread or nothing")
endif()
