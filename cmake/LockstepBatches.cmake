# lockstep_compile_in_batches(TARGET PREFIX FILES_A_BATCH FILE...)
#
# Compiles the files as a few larger ones (CMake's unity build): most of a file's compile time is LibTorch's headers, which
# a batch reads once. Files of one batch share their anonymous namespaces. With LOCKSTEP_UNITY=OFF, as in the preset
# "separate", each file is compiled alone, which shows whether it includes what it uses.
# The files are named as the target has them, and belong to batches of this prefix; sizes are as equal as can be.
option(LOCKSTEP_UNITY "Compile several files of a room at once, which halves the time" ${PROJECT_IS_TOP_LEVEL})

function(lockstep_compile_in_batches target prefix files_a_batch)
  list(LENGTH ARGN files)
  if(NOT LOCKSTEP_UNITY OR files LESS 2)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  math(EXPR batches "(${files} + ${files_a_batch} - 1) / ${files_a_batch}")
  set(index 0)
  foreach(file IN LISTS ARGN)
    math(EXPR batch "${index} * ${batches} / ${files}")
    set_source_files_properties("${file}" TARGET_DIRECTORY ${target} PROPERTIES UNITY_GROUP "${prefix}_${batch}")
    math(EXPR index "${index} + 1")
  endforeach()
endfunction()
