# lockstep_fuzzer([FOLDER/]NAME)
#
# Makes the program NAME_fuzz of NAME_fuzz.cc in the calling folder (or below it), which defines LLVMFuzzerTestOneInput,
# and a test of that name: a short run, or a minute with LOCKSTEP_TEST_ALL, from the target's seeds and the files in
# tests/corpus/NAME. With clang and LOCKSTEP_LIBFUZZER=ON the program is libFuzzer's, and there is no test; the library
# then is instrumented, too.
option(LOCKSTEP_LIBFUZZER "Build the fuzzers with libFuzzer and AddressSanitizer; needs clang 16" OFF)
if(LOCKSTEP_LIBFUZZER)
  # Older ones have no std::source_location.
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang" OR CMAKE_CXX_COMPILER_VERSION VERSION_LESS 16)
    message(FATAL_ERROR "LOCKSTEP_LIBFUZZER needs clang 16 or newer (found ${CMAKE_CXX_COMPILER_ID} "
      "${CMAKE_CXX_COMPILER_VERSION}): set CXX to it, or leave LOCKSTEP_LIBFUZZER off for the fuzzers' own driver")
  elseif(LOCKSTEP_SANITIZER)
    message(FATAL_ERROR "LOCKSTEP_LIBFUZZER brings AddressSanitizer with it: leave LOCKSTEP_SANITIZER empty")
  endif()
  # Warnings are GCC's business, with which everything else is built.
  add_compile_options(-fsanitize=fuzzer-no-link,address -fno-omit-frame-pointer -Wno-error)
  add_link_options(-fsanitize=fuzzer-no-link,address)
endif()

function(lockstep_fuzzer path)
  if(NOT LOCKSTEP_BUILD_TESTS)
    return()
  endif()
  get_filename_component(name "${path}" NAME)
  add_executable(${name}_fuzz ${path}_fuzz.cc)
  target_link_libraries(${name}_fuzz PRIVATE lockstep ZLIB::ZLIB)
  if(LOCKSTEP_LIBFUZZER)
    target_link_options(${name}_fuzz PRIVATE -fsanitize=fuzzer,address)
    return()
  endif()
  target_link_libraries(${name}_fuzz PRIVATE lockstep_fuzz_driver)
  set(corpus "${PROJECT_SOURCE_DIR}/tests/corpus/${name}")
  if(NOT IS_DIRECTORY "${corpus}")
    set(corpus "")
  endif()
  add_test(NAME ${name}_fuzz COMMAND ${name}_fuzz --test --artifacts "${PROJECT_BINARY_DIR}/fuzz" ${corpus})
  set_tests_properties(${name}_fuzz PROPERTIES TIMEOUT 300 ENVIRONMENT
    "LOCKSTEP_LOG=error;ASAN_OPTIONS=detect_leaks=0;UBSAN_OPTIONS=halt_on_error=1 print_stacktrace=1;TSAN_OPTIONS=halt_on_error=1")
endfunction()
