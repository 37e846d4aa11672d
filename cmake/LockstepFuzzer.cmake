# lockstep_fuzzer([FOLDER/]NAME [LINK LIBRARY...])
#
# Makes the program NAME_fuzz of NAME_fuzz.cc in the calling folder (or below it), which defines a LOCKSTEP_FUZZ_TARGET, and
# a test of that name: a short run, or a minute with LOCKSTEP_TEST_ALL, from the target's seeds and the files in
# tests/corpus/NAME. All targets are compiled into one program, fuzz_targets, to which NAME_fuzz is a link
# (lockstep/testing/driver.h).
function(lockstep_fuzzer path)
  cmake_parse_arguments(PARSE_ARGV 1 FUZZER "" "" "LINK")
  set(source "${CMAKE_CURRENT_SOURCE_DIR}/${path}_fuzz.cc")
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_FUZZ_SOURCES "${source}")
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_FUZZ_LIBRARIES ${FUZZER_LINK})
endfunction()

# Makes the program of all rooms' targets, and the tests; called once the library is complete.
function(lockstep_add_fuzzers)
  get_property(sources GLOBAL PROPERTY LOCKSTEP_FUZZ_SOURCES)
  get_property(libraries GLOBAL PROPERTY LOCKSTEP_FUZZ_LIBRARIES)
  add_executable(fuzz_targets ${sources})
  target_link_libraries(fuzz_targets PRIVATE lockstep lockstep_fuzz_driver lockstep_driver_main ZLIB::ZLIB ${libraries})
  target_compile_options(fuzz_targets PRIVATE $<$<CONFIG:Release,RelWithDebInfo>:-O0>)  # as all tests
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
