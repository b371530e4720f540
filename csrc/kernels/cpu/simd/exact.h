// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Included first by the stages whose results must agree bit for bit between ranks of different
// CPUs: there is no FMA but that of fused.h, which is one everywhere, and no other product is
// contracted into one. What is left to do in such a file is to add in an order that does not depend
// on the number of lanes.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif
