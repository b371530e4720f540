# SPDX-License-Identifier: BSD-3-Clause
#
# Compiles the tests without torch for 64-bit ARM, and runs them under qemu.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)

# The system's GoogleTest is compiled for this machine; libgtest-dev brings its sources as well.
if(EXISTS /usr/src/googletest)
  set(FETCHCONTENT_SOURCE_DIR_GOOGLETEST /usr/src/googletest CACHE PATH "")
endif()
