# lockstep_room(NAME  the last folder of its path; no two rooms have one name
#   [COMPONENT]  a library of its own, Lockstep::NAME, for a part with an optional dependency; without it
#                the room's files belong to Lockstep::lockstep
#   [STATIC]     a library of its own, lockstep_NAME, that only programs of this build link; it is not installed
#   MAY_INCLUDE  rooms below this one, by their folders (base, parallel/ddp); scripts/check-includes holds every #include
#                against this list
#   TESTS_MAY_INCLUDE  rooms beside those that its tests include: no arrows of the library
#   PRIVATE      its folders whose headers are for the room alone, as those of internal/ are
#   SOURCES      files of the library
#   TESTS        NAME_test.cc files, linked into one program NAME_tests, one ctest of the same name; with a
#                NAME_device_test.cc among them, a second ctest NAME_gpu runs the same program's suites *OnDevice and
#                *OnCuda on a card (label gpu: scripts/test --gpu)
#   TORCH_TESTS  among them are some that include torch/torch.h: all are compiled with it precompiled. Reading that header
#                takes as long as eight files of a room that includes single ones
#   TEST_TIMEOUT seconds; 300 unless told, and eight times as many under a sanitizer
#   HOSTS_TESTS  names of tests, as patterns of GoogleTest's filter, that a second ctest NAME_hosts runs again with the ranks
#                on two pretended hosts, which pass messages over loopback (LOCKSTEP_TEST_HOSTS, testing/multi_rank.h);
#                skipped without UCX. What follows the first pattern with a - in front is left out. For what takes
#                another way over hosts: arguments that are refused, and what is built on other operations alone, is not
#   DRIVERS      NAME_driver.cc files, for tests in Python: links to one program of all rooms, test_drivers
#                (lockstep/testing/driver.h); not of a COMPONENT, whose drivers are programs of their own
#   LINK         libraries that a COMPONENT or a STATIC room links
function(lockstep_room name)
  cmake_parse_arguments(ROOM "COMPONENT;STATIC;TORCH_TESTS" "TEST_TIMEOUT"
    "MAY_INCLUDE;TESTS_MAY_INCLUDE;PRIVATE;SOURCES;TESTS;HOSTS_TESTS;DRIVERS;LINK" ${ARGN})
  list(TRANSFORM ROOM_SOURCES PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/")
  if(ROOM_COMPONENT)
    add_library(lockstep_${name} SHARED ${ROOM_SOURCES})
    add_library(Lockstep::${name} ALIAS lockstep_${name})
    set_target_properties(lockstep_${name} PROPERTIES EXPORT_NAME ${name})
    target_link_libraries(lockstep_${name} PUBLIC lockstep PRIVATE ${ROOM_LINK})
    lockstep_compile_in_batches(lockstep_${name} ${name} 12 ${ROOM_SOURCES})
    set_property(GLOBAL APPEND PROPERTY LOCKSTEP_COMPONENTS lockstep_${name})
  elseif(ROOM_STATIC)
    add_library(lockstep_${name} STATIC ${ROOM_SOURCES})
    target_link_libraries(lockstep_${name} PUBLIC lockstep PRIVATE ${ROOM_LINK})
    lockstep_compile_in_batches(lockstep_${name} ${name} 12 ${ROOM_SOURCES})
  else()
    target_sources(lockstep PRIVATE ${ROOM_SOURCES})
    lockstep_compile_in_batches(lockstep ${name} 12 ${ROOM_SOURCES})
  endif()
  list(TRANSFORM ROOM_DRIVERS PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/")
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_DRIVERS ${ROOM_DRIVERS})
  if(LOCKSTEP_BUILD_TESTS AND ROOM_TESTS)
    list(TRANSFORM ROOM_TESTS PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/")
    set_property(GLOBAL APPEND PROPERTY LOCKSTEP_TEST_PROGRAMS ${name}_tests)
    set_property(GLOBAL PROPERTY LOCKSTEP_${name}_TESTS "${ROOM_TESTS}")
    if(NOT ROOM_TEST_TIMEOUT)
      set(ROOM_TEST_TIMEOUT 300)
    endif()
    set_property(GLOBAL PROPERTY LOCKSTEP_${name}_TIMEOUT "${ROOM_TEST_TIMEOUT}")
    set_property(GLOBAL PROPERTY LOCKSTEP_${name}_TORCH_TESTS "${ROOM_TORCH_TESTS}")
    list(JOIN ROOM_HOSTS_TESTS ":" hosts_tests)
    set_property(GLOBAL PROPERTY LOCKSTEP_${name}_HOSTS_TESTS "${hosts_tests}")
  endif()
endfunction()

# Makes the test programs of all rooms; called once the library is complete.
function(lockstep_add_test_programs)
  get_property(programs GLOBAL PROPERTY LOCKSTEP_TEST_PROGRAMS)
  foreach(program IN LISTS programs)
    string(REGEX REPLACE "_tests$" "" room "${program}")
    get_property(sources GLOBAL PROPERTY LOCKSTEP_${room}_TESTS)
    get_property(timeout GLOBAL PROPERTY LOCKSTEP_${room}_TIMEOUT)
    if(LOCKSTEP_SANITIZER)
      math(EXPR timeout "${timeout} * 8")
    endif()
    get_property(torch_tests GLOBAL PROPERTY LOCKSTEP_${room}_TORCH_TESTS)
    get_property(hosts_tests GLOBAL PROPERTY LOCKSTEP_${room}_HOSTS_TESTS)
    add_executable(${program} ${sources})
    target_link_libraries(${program} PRIVATE lockstep_testing)
    if(TARGET lockstep_${room})
      target_link_libraries(${program} PRIVATE lockstep_${room})
    endif()
    if(torch_tests)
      target_precompile_headers(${program} REUSE_FROM lockstep_testing)
    endif()
    lockstep_compile_in_batches(${program} tests 16 ${sources})
    add_test(NAME ${program} COMMAND ${program})
    set(environment "LOCKSTEP_BIN_DIR=${CMAKE_RUNTIME_OUTPUT_DIRECTORY};TSAN_OPTIONS=halt_on_error=1 allocator_may_return_null=1 die_after_fork=0 second_deadlock_stack=1 report_mutex_bugs=0 ignore_interceptors_accesses=1 suppressions=${PROJECT_SOURCE_DIR}/cmake/tsan.supp;ASAN_OPTIONS=detect_leaks=0 allocator_may_return_null=1;UBSAN_OPTIONS=halt_on_error=1 print_stacktrace=1")
    if(LOCKSTEP_SANITIZER STREQUAL "thread")
      list(APPEND environment "OMP_NUM_THREADS=1")  # ThreadSanitizer does not see how OpenMP's threads wait for each other
    endif()
    set_tests_properties(${program} PROPERTIES TIMEOUT ${timeout} ENVIRONMENT "${environment}")
    if(TARGET lockstep_cuda)  # loaded when a test asks for CUDA
      add_dependencies(${program} lockstep_cuda)
    endif()
    if(hosts_tests)
      add_test(NAME ${room}_hosts COMMAND ${program} "--gtest_filter=${hosts_tests}")
      set_tests_properties(${room}_hosts PROPERTIES TIMEOUT ${timeout} SKIP_RETURN_CODE 77
        ENVIRONMENT "${environment};LOCKSTEP_TEST_HOSTS=2")
    endif()
    if(sources MATCHES "_device_test\\.cc")
      add_test(NAME ${room}_gpu COMMAND ${program} "--gtest_filter=*OnDevice*:*OnCuda*")
      set_tests_properties(${room}_gpu PROPERTIES TIMEOUT ${timeout} LABELS gpu
        # A kernel that is loaded at its first use may wait for a stream that a test holds up.
        ENVIRONMENT "${environment};LOCKSTEP_TEST_DEVICE=cuda;CUDA_MODULE_LOADING=EAGER")
    endif()
  endforeach()
endfunction()

# lockstep_link_drivers(TARGET FILE...): makes links to the program beside it, with the names of the drivers' files.
function(lockstep_link_drivers target)
  foreach(file IN LISTS ARGN)
    get_filename_component(name "${file}" NAME_WE)
    set(link "${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/${name}")
    list(APPEND links "${link}")
    list(APPEND commands COMMAND "${CMAKE_COMMAND}" -E create_symlink ${target} "${link}")
  endforeach()
  add_custom_command(TARGET ${target} POST_BUILD ${commands} BYPRODUCTS ${links} VERBATIM)
endfunction()
