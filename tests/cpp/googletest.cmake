# SPDX-License-Identifier: BSD-3-Clause
#
# GoogleTest from the system, or else its release from GitHub, which is downloaded once.

find_package(GTest QUIET)
if(GTest_FOUND)
  return()
endif()

set(POWERSGD_GTEST_URL "https://github.com/google/googletest/archive/refs/tags/v1.14.0.tar.gz"
    CACHE STRING "Where GoogleTest is downloaded from if the system has none")
set(gtest_hash 8ad598c73ad796e0d8280b082cebd82a630d73e73cd3c70057938a6501bba5d7)
set(gtest_archive "${CMAKE_CURRENT_BINARY_DIR}/googletest.tar.gz")

if(NOT POWERSGD_GTEST_URL AND NOT FETCHCONTENT_SOURCE_DIR_GOOGLETEST)
  message(FATAL_ERROR "GoogleTest is not installed, and POWERSGD_GTEST_URL names no place for it")
endif()

# FetchContent's own download fails with a page of errors that names neither cause nor remedy.
if(NOT FETCHCONTENT_SOURCE_DIR_GOOGLETEST AND NOT EXISTS "${gtest_archive}")
  message(STATUS "GoogleTest is not installed: downloading ${POWERSGD_GTEST_URL}")
  file(DOWNLOAD "${POWERSGD_GTEST_URL}" "${gtest_archive}.part" STATUS result TIMEOUT 120)
  list(GET result 0 code)
  list(GET result 1 reason)
  if(code EQUAL 0)
    file(SHA256 "${gtest_archive}.part" actual)
    if(NOT actual STREQUAL gtest_hash)
      set(code 1)
      set(reason "its SHA-256 is ${actual}")
    endif()
  endif()
  if(NOT code EQUAL 0)
    file(REMOVE "${gtest_archive}.part")
    message(FATAL_ERROR "GoogleTest is not installed, and its download from ${POWERSGD_GTEST_URL} "
                        "failed (${reason}). On Debian or Ubuntu: sudo apt-get install libgtest-dev")
  endif()
  file(RENAME "${gtest_archive}.part" "${gtest_archive}")
endif()

include(FetchContent)
set(INSTALL_GTEST OFF CACHE BOOL "" FORCE)
set(BUILD_GMOCK OFF CACHE BOOL "" FORCE)
FetchContent_Declare(googletest URL "${gtest_archive}" URL_HASH SHA256=${gtest_hash})
FetchContent_MakeAvailable(googletest)
