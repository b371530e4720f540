# SPDX-License-Identifier: BSD-3-Clause
#
# The tests of the layers without torch: the plan and the kernels.

file(GLOB kernel_fixtures CONFIGURE_DEPENDS kernels/fixtures/*.cpp)
add_library(powersgd_kernel_test STATIC ${kernel_fixtures})
target_link_libraries(powersgd_kernel_test PUBLIC powersgd_options GTest::gtest)

file(GLOB kernel_tests CONFIGURE_DEPENDS kernels/test_*.cpp kernels/shared/test_*.cpp)  # any runner
file(GLOB_RECURSE cpu_kernel_tests CONFIGURE_DEPENDS kernels/cpu/test_*.cpp)
# Compiled once: the program that links them has the runner.
add_library(powersgd_kernel_tests OBJECT ${kernel_tests})
target_link_libraries(powersgd_kernel_tests PUBLIC powersgd_kernel_test)

# Neither has threads, other than OpenMP's, which ThreadSanitizer does not know.
if(NOT checks_threads)
  file(GLOB plan_tests CONFIGURE_DEPENDS plan/test_*.cpp)
  powersgd_test(plan SOURCES ${plan_tests} LIBRARIES powersgd_core)
  powersgd_test(kernels SOURCES $<TARGET_OBJECTS:powersgd_kernel_tests> ${cpu_kernel_tests}
                kernels/runners/cpu_runners.cpp
                LIBRARIES powersgd_kernel_test powersgd_core)
endif()

include(cuda.cmake)
