// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace powersgd {

// An intrusive_ptr that lets go of the GIL while it lets go of the object. The last reference to a
// backend joins its threads, and Gloo's need the GIL to drop a tensor that Python made: a destructor
// that held it would wait for ever.
template <typename T>
class NoGilPtr {
 public:
  NoGilPtr() = default;
  NoGilPtr(c10::intrusive_ptr<T> pointer) : pointer_(std::move(pointer)) {}
  explicit NoGilPtr(T* pointer) : pointer_(c10::intrusive_ptr<T>::unsafe_steal_from_new(pointer)) {}
  NoGilPtr(const NoGilPtr&) = default;
  NoGilPtr(NoGilPtr&&) noexcept = default;
  NoGilPtr& operator=(const NoGilPtr&) = default;
  NoGilPtr& operator=(NoGilPtr&&) noexcept = default;
  ~NoGilPtr() {
    if (!pointer_) return;
    if (PyGILState_Check()) {
      const pybind11::gil_scoped_release no_gil;
      pointer_.reset();
    }
  }

  T* get() const { return pointer_.get(); }
  T& operator*() const { return *pointer_; }
  T* operator->() const { return pointer_.get(); }
  operator c10::intrusive_ptr<T>() const { return pointer_; }

 private:
  c10::intrusive_ptr<T> pointer_;  // the only member: pybind11 reads a holder as its base's holder
};

}  // namespace powersgd

PYBIND11_DECLARE_HOLDER_TYPE(T, powersgd::NoGilPtr<T>, true)
