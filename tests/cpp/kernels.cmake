# SPDX-License-Identifier: BSD-3-Clause
#
# The layers without torch, the plan and the kernels, and their tests. The same kernel tests run the
# CPU's kernels, and the CUDA kernels on the SIMT runtime. For a GPU `make gpu-programs` builds them.

file(GLOB_RECURSE core_sources CONFIGURE_DEPENDS "${ROOT}/csrc/core/*.cpp"
     "${ROOT}/csrc/kernels/cpu/*.cpp" "${ROOT}/csrc/kernels/shared/*.cpp")
add_library(powersgd_core STATIC ${core_sources})
target_link_libraries(powersgd_core PUBLIC powersgd_options)
if(POWERSGD_SANITIZE)  # inlined as in a release, each instruction set takes minutes to compile
  target_compile_definitions(powersgd_core PRIVATE POWERSGD_TILE_FUNCTION=)
endif()
add_library(powersgd_cpu_runners STATIC kernels/runners/cpu_runners.cpp)
target_link_libraries(powersgd_cpu_runners PUBLIC powersgd_core)

file(GLOB kernel_fixtures CONFIGURE_DEPENDS kernels/fixtures/*.cpp)
file(GLOB kernel_tests CONFIGURE_DEPENDS kernels/test_*.cpp kernels/shared/test_*.cpp)
# Compiled once: the program that links them has the runners.
add_library(powersgd_kernel_tests OBJECT ${kernel_fixtures} ${kernel_tests})
target_link_libraries(powersgd_kernel_tests PUBLIC powersgd_options GTest::gtest)
set_target_properties(powersgd_kernel_tests PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)

# Neither has threads, other than OpenMP's, which ThreadSanitizer does not know.
if(NOT checks_threads)
  file(GLOB core_tests CONFIGURE_DEPENDS core/test_*.cpp)
  powersgd_test(core SOURCES ${core_tests} LIBRARIES powersgd_core)
  file(GLOB_RECURSE cpu_kernel_tests CONFIGURE_DEPENDS kernels/cpu/test_*.cpp)
  set(if_emulated "")
  if(CMAKE_CROSSCOMPILING)  # slow: each kernel at all types, and at all shapes but the largest
    set(if_emulated
        HALVES FILTER KnownBits.* MultiplyAdd.* *.MatchesTheReference/* *.RandomColumns/*
        *.QuantizeRoundsEveryGroup/* *.TwoShotRoundsTheSumOnce/* *.RanksAgreeBitForBit/*
        -*17001r1)
  endif()
  powersgd_test(kernels SOURCES ${cpu_kernel_tests}
                LIBRARIES powersgd_kernel_tests powersgd_cpu_runners ${if_emulated})
endif()

if(CMAKE_CROSSCOMPILING)
  return()
endif()

find_library(POWERSGD_boost_context boost_context)
if(NOT POWERSGD_boost_context)
  message(WARNING "libboost-context-dev is not installed: the CUDA kernels are not tested")
  return()
endif()

# --- The CUDA kernels on the SIMT runtime, which needs Boost.Context ---------------------------

file(GLOB cuda_kernels CONFIGURE_DEPENDS "${ROOT}/csrc/kernels/cuda/*.cu")
set_source_files_properties(${cuda_kernels} PROPERTIES LANGUAGE CXX)
set(runtime simt/grid.cpp simt/races.cpp simt/simt.cpp)
add_library(powersgd_simt STATIC ${cuda_kernels} "${ROOT}/csrc/kernels/cuda/block_tiles.cpp"
            ${runtime} kernels/runners/simt_runners.cpp)
target_link_libraries(powersgd_simt PUBLIC powersgd_core "${POWERSGD_boost_context}")

# Tests of what kernels include, and of the runtime.
file(GLOB simt_tests CONFIGURE_DEPENDS kernels/cuda/test_*.cpp)
list(APPEND simt_tests simt/test_simt.cpp)
set(simt_filter "")
if(POWERSGD_SANITIZE)
  # Each kernel at all shapes and types, and by its other ways except at the largest shapes. The
  # other tests take the same ways with other values.
  set(simt_filter
      Simt.* Races.* Launches* TensorCores.* *.MatchesTheReference/*
      All/Project.WithoutErrorFeedback/* *.WithoutErrorFeedbackReadsTheGradient/*
      *.RandomColumns/* *.MoreColumnsThanNumericRank/* *.SkipsWhenAnElementOfQIsNotFinite/*
      *.QuantizeRoundsEveryGroup/* *.TwoShotRoundsTheSumOnce/* *.RanksAgreeBitForBit/*
      -*.WithoutErrorFeedback*17001r1 *.WithoutErrorFeedback*1030x36r32 *.SkipsWhen*17001r1
      *.WithoutErrorFeedback*600x136r16 *.WithoutErrorFeedback*4100x12r4*)
endif()
if(checks_threads)
  # The threads to check are those of CUDA, see races.h. The runtime is none of their code.
  set_source_files_properties(
    ${runtime} PROPERTIES COMPILE_OPTIONS "-fno-sanitize=thread;-DPOWERSGD_CHECK_RACES")
  list(APPEND simt_tests simt/test_races.cpp)
endif()
powersgd_test(kernels_simt HALVES SOURCES ${simt_tests} LIBRARIES powersgd_kernel_tests powersgd_simt
              FILTER ${simt_filter})
foreach(target powersgd_simt kernels_simt)
  target_include_directories(${target} BEFORE PRIVATE simt/include)  # CUDA's headers
  target_compile_options(${target} PRIVATE -Wno-unknown-pragmas)  # unroll
  if(checks_threads)
    target_compile_options(${target} PRIVATE --param=tsan-distinguish-volatile=1
                           -g1)  # reports name lines
  endif()
endforeach()
