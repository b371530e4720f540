// SPDX-License-Identifier: BSD-3-Clause
#include <pthread.h>

#include <ctime>

// The programs that ThreadSanitizer checks link this file.

// std::timed_mutex::try_lock_for calls this, of which the sanitizer of GCC 12 knows nothing. It
// knows pthread_mutex_timedlock, whose deadline is one of the system's clock.
extern "C" int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock,
                                       const timespec* deadline) noexcept {
  constexpr long kSecond = 1'000'000'000;  // ns
  timespec now, system;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &system);
  system.tv_sec += deadline->tv_sec - now.tv_sec;
  system.tv_nsec += deadline->tv_nsec - now.tv_nsec;
  if (system.tv_nsec < 0) {
    system.tv_nsec += kSecond;
    --system.tv_sec;
  } else if (system.tv_nsec >= kSecond) {
    system.tv_nsec -= kSecond;
    ++system.tv_sec;
  }
  return pthread_mutex_timedlock(mutex, &system);
}

// These reports are false. torch and the C++ library are not compiled with the sanitizer. It does
// not see all of their atomic decrements of a reference count, and so not why the last owner may
// destroy.
extern "C" const char* __tsan_default_suppressions() {
  return "race:c10::TensorImpl::~TensorImpl\n"
         "race:c10::detail::ListImpl::~ListImpl\n"
         "race:c10::Error::~Error\n"
         "race:torch::autograd::DifferentiableViewMeta::~DifferentiableViewMeta\n"
         "race:cxa_at_exit_wrapper\n";  // torch's static objects
}
