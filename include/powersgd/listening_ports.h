// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

namespace powersgd {

// Makes sockets that torch lets the system choose a port for, as Gloo's, listen on the first free
// port from `first` to `last`. Both 0: the system chooses again.
//
// Gloo asks for no port and takes none. So from the first call on, libtorch_cpu calls this
// library's bind() in place of that of the C library. Sockets of other libraries stay as they are.
//
// Returns false if libtorch_cpu does not call bind() by a table that can be changed.
//
// Threads: one at a time. Other threads may open sockets meanwhile.
bool listen_within(uint16_t first, uint16_t last);

}  // namespace powersgd
