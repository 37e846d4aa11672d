# lockstep_fuzzer([FOLDER/]NAME [LINK LIBRARY...])
#
# Makes the program NAME_fuzz of NAME_fuzz.cc in the calling folder (or below it), which defines a LOCKSTEP_FUZZ_TARGET, and
# a test of that name: a short run, or a minute with LOCKSTEP_TEST_ALL, from the target's seeds and the files in
# tests/corpus/NAME. All targets are compiled into one program, fuzz_targets, to which NAME_fuzz is a link
# (lockstep/testing/driver.h). With clang and LOCKSTEP_LIBFUZZER=ON each is a program of libFuzzer's, and there is no test;
# the library then is instrumented, too.
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
  cmake_parse_arguments(PARSE_ARGV 1 FUZZER "" "" "LINK")
  set(source "${CMAKE_CURRENT_SOURCE_DIR}/${path}_fuzz.cc")
  if(NOT LOCKSTEP_LIBFUZZER)
    set_property(GLOBAL APPEND PROPERTY LOCKSTEP_FUZZ_SOURCES "${source}")
    set_property(GLOBAL APPEND PROPERTY LOCKSTEP_FUZZ_LIBRARIES ${FUZZER_LINK})
  elseif(LOCKSTEP_BUILD_TESTS)
    get_filename_component(program "${source}" NAME_WE)
    add_executable(${program} "${source}")
    target_compile_definitions(${program} PRIVATE LOCKSTEP_LIBFUZZER)
    target_link_libraries(${program} PRIVATE lockstep ZLIB::ZLIB ${FUZZER_LINK})
    target_link_options(${program} PRIVATE -fsanitize=fuzzer,address)
  endif()
endfunction()

# Makes the program of all rooms' targets, and the tests; called once the library is complete.
function(lockstep_add_fuzzers)
  if(LOCKSTEP_LIBFUZZER)
    return()
  endif()
  get_property(sources GLOBAL PROPERTY LOCKSTEP_FUZZ_SOURCES)
  get_property(libraries GLOBAL PROPERTY LOCKSTEP_FUZZ_LIBRARIES)
  add_executable(fuzz_targets ${sources})
  target_link_libraries(fuzz_targets PRIVATE lockstep lockstep_fuzz_driver lockstep_driver_main ZLIB::ZLIB ${libraries})
  target_compile_options(fuzz_targets PRIVATE $<$<CONFIG:Release>:-O0>)  # as all tests
  lockstep_compile_in_batches(fuzz_targets fuzz 20 ${sources})
  lockstep_link_drivers(fuzz_targets ${sources})
  foreach(source IN LISTS sources)
    get_filename_component(program "${source}" NAME_WE)
    string(REGEX REPLACE "_fuzz$" "" name "${program}")
    set(corpus "${PROJECT_SOURCE_DIR}/tests/corpus/${name}")
    if(NOT IS_DIRECTORY "${corpus}")
      set(corpus "")
    endif()
    add_test(NAME ${program} COMMAND "${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/${program}"
      --test --artifacts "${PROJECT_BINARY_DIR}/fuzz" ${corpus})
    set_tests_properties(${program} PROPERTIES TIMEOUT 300 ENVIRONMENT
      "LOCKSTEP_LOG=error;ASAN_OPTIONS=detect_leaks=0;UBSAN_OPTIONS=halt_on_error=1 print_stacktrace=1;TSAN_OPTIONS=halt_on_error=1")
  endforeach()
endfunction()
