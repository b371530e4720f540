// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// The ranks of a job may run on different CPUs, and some results must agree bit for bit. The
// compiler therefore contracts no product and sum into an FMA by itself: multiply_add and
// multiply_add_reproducibly say where there is one. A target's file includes this header before all
// others that are compiled for the target.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif
