// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

namespace powersgd {

// Makes sockets for which torch lets the system choose a port, such as Gloo's, listen on the first
// free port from `first` to `last`. If both are 0, the system chooses again.
//
// Gloo has no option for the port, so from the first call on, libtorch_cpu calls this library's
// bind() instead of the C library's. Sockets of other libraries are not affected.
//
// Returns false if libtorch_cpu does not call bind() through a table that can be changed.
//
// Threads: one at a time. Other threads may open sockets meanwhile.
bool listen_within(uint16_t first, uint16_t last);

}  // namespace powersgd
