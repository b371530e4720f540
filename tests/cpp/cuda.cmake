# SPDX-License-Identifier: BSD-3-Clause
#
# The kernel tests of the CUDA kernels on the SIMT runtime, which needs Boost.Context. For a GPU
# `make gpu-programs` builds them.

file(GLOB cuda_kernels CONFIGURE_DEPENDS "${ROOT}/csrc/kernels/cuda/*.cu")
set(cuda_host "${ROOT}/csrc/kernels/cuda/block_tiles.cpp" "${ROOT}/csrc/kernels/shared/packet_layout.cpp"
    "${ROOT}/csrc/plan/options.cpp")

find_library(POWERSGD_boost_context boost_context)
if(POWERSGD_boost_context)
  # Each .cu file is included by a C++ file, because it may be a CUDA source as well.
  set(simt_sources "")
  foreach(kernel ${cuda_kernels})
    get_filename_component(name "${kernel}" NAME_WE)
    set(source "${CMAKE_CURRENT_BINARY_DIR}/simt/${name}.cpp")
    file(GENERATE OUTPUT "${source}" CONTENT "#include \"${kernel}\"\n")
    list(APPEND simt_sources "${source}")
  endforeach()
  # Tests of headers that kernels include.
  add_library(powersgd_simt_device_tests OBJECT kernels/cuda/test_tensor_cores.cpp)
  target_link_libraries(powersgd_simt_device_tests PRIVATE powersgd_kernel_test)
  add_library(powersgd_simt STATIC ${simt_sources} "${cuda_host}" simt/grid.cpp
              simt/simt.cpp simt/races.cpp)
  foreach(target powersgd_simt powersgd_simt_device_tests)
    target_include_directories(${target} BEFORE PRIVATE simt/include)  # CUDA's headers
    target_compile_options(${target} PRIVATE -Wno-unknown-pragmas)  # unroll
  endforeach()
  set(simt_filter "")
  if(checks_threads)
    # The threads to check are those of CUDA, see races.h. The runtime is none of their code.
    set_source_files_properties(
      simt/grid.cpp simt/simt.cpp simt/races.cpp
      PROPERTIES COMPILE_OPTIONS "-fno-sanitize=thread;-DPOWERSGD_CHECK_RACES")
    target_sources(powersgd_simt_device_tests PRIVATE simt/test_races.cpp)
    foreach(target powersgd_simt powersgd_simt_device_tests)
      target_compile_options(${target} PRIVATE --param=tsan-distinguish-volatile=1
                             -g1)  # reports name lines
    endforeach()
    # Each kernel at all shapes and types, and by its other ways except at the largest shapes. The
    # other tests take the same ways with other values.
    set(simt_filter
        Simt.* Races.* Launches* TensorCores.* *.MatchesTheReference/*
        All/Project.WithoutErrorFeedback/* *.WithoutErrorFeedbackReadsTheGradient/*
        *.RandomColumns/* *.MoreColumnsThanNumericRank/* *.SkipsWhenAnElementOfQIsNotFinite/*
        *.QuantizeRoundsEveryGroup/* *.TwoShotRoundsTheSumOnce/* *.RanksAgreeBitForBit/*
        -*.WithoutErrorFeedback*33000x5r2 *.WithoutErrorFeedback*17001r1
        *.SkipsWhen*33000x5r2 *.SkipsWhen*17001r1)
  endif()
  target_link_libraries(powersgd_simt PUBLIC powersgd_options "${POWERSGD_boost_context}")
  powersgd_test(kernels_simt SOURCES $<TARGET_OBJECTS:powersgd_kernel_tests>
                $<TARGET_OBJECTS:powersgd_simt_device_tests> simt/test_simt.cpp
                kernels/cuda/test_launches.cpp
                kernels/runners/simt_runners.cpp
                LIBRARIES powersgd_kernel_test powersgd_simt FILTER ${simt_filter})
  target_include_directories(kernels_simt BEFORE PRIVATE simt/include)
else()
  message(WARNING "libboost-context-dev is not installed: the CUDA kernels are not tested")
endif()
