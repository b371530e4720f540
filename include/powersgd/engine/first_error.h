// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <exception>
#include <utility>

namespace powersgd {

// Runs functions one after the other, even if some throw. Keeps the first exception.
class FirstError {
 public:
  template <typename F>
  void run(F&& f) {
    try {
      std::forward<F>(f)();
    } catch (...) {
      if (!first_) first_ = std::current_exception();
    }
  }

  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::exception_ptr first_;
};

}  // namespace powersgd
