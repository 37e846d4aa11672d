# cmake --install: library, public headers, the lockstep program, and a package for find_package(Lockstep).
include(CMakePackageConfigHelpers)

get_property(components GLOBAL PROPERTY LOCKSTEP_COMPONENTS)
# What `cmake --install` needs to have been built; scripts/quickstart builds no more, but for its example.
add_custom_target(lockstep_installable DEPENDS lockstep ${components})
if(TARGET lockstep_cli)
  add_dependencies(lockstep_installable lockstep_cli)
endif()
install(TARGETS lockstep ${components} EXPORT LockstepTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT LockstepTargets NAMESPACE Lockstep:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Lockstep)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/lockstep" DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h" PATTERN "testing" EXCLUDE PATTERN "parity" EXCLUDE PATTERN "__pycache__" EXCLUDE
  PATTERN "control_plane" EXCLUDE  # the lockstep program's alone
  PATTERN "ucx_library.h" EXCLUDE)  # it includes UCX's headers
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION ${CMAKE_INSTALL_DOCDIR})
# Messages name these pages.
install(DIRECTORY "${PROJECT_SOURCE_DIR}/docs" DESTINATION ${CMAKE_INSTALL_DOCDIR}
  FILES_MATCHING PATTERN "*.md" PATTERN "images" EXCLUDE PATTERN "jobs" EXCLUDE)
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/LockstepConfig.cmake.in" "${PROJECT_BINARY_DIR}/LockstepConfig.cmake"
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Lockstep)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/LockstepConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/LockstepConfig.cmake" "${PROJECT_BINARY_DIR}/LockstepConfigVersion.cmake"
  "${CMAKE_CURRENT_LIST_DIR}/FindLibTorch.cmake" DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Lockstep)
