# lockstep_find(VARIABLE FILE HEADER | LIBRARY NAME   PACKAGE DEBIAN_PACKAGE)
#
# Sets the cache variable to the folder of a header, or to a library, for those that come with no package for CMake.
# Stops with what to install where it is not found.
function(lockstep_find variable kind name)
  cmake_parse_arguments(PARSE_ARGV 3 FIND "" "PACKAGE" "")
  if(kind STREQUAL "FILE")
    find_path(${variable} ${name})
  else()
    find_library(${variable} ${name})
  endif()
  if(NOT ${variable})
    message(FATAL_ERROR "Lockstep needs ${name}, which is not here; install it (Debian: ${FIND_PACKAGE}), or set ${variable}")
  endif()
endfunction()
