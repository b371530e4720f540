// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/core/options.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings/register.h"
#include "powersgd/core/option_table.h"

namespace py = pybind11;

namespace powersgd {
namespace {

// Python sees a scope or a data type by its name.
struct Properties {
  py::class_<Options>& options;

  template <typename Value>
  void operator()(const char* name, Value Options::* member) const {
    options.def_readwrite(name, member);
  }

  void operator()(const char* name, Scope Options::* member) const {
    options.def_property(
        name, [member](const Options& self) { return to_string(self.*member); },
        [member](Options& self, const std::string& text) { self.*member = parse_scope(text); });
  }

  void operator()(const char* name, DType Options::* member) const {
    options.def_property(
        name, [member](const Options& self) { return to_string(self.*member); },
        [member](Options& self, const std::string& text) { self.*member = parse_dtype(text); });
  }

  void operator()(const char* name, std::optional<WireDType> Options::* member) const {
    using Text = std::optional<std::string>;
    options.def_property(
        name,
        [member](const Options& self) {
          return self.*member ? Text(to_string(*(self.*member))) : std::nullopt;
        },
        [member](Options& self, const Text& text) {
          self.*member = text ? std::optional(parse_wire_dtype(*text)) : std::nullopt;
        });
  }
};

}  // namespace

void register_options(py::module_& module) {
  py::class_<Options> options(module, "Options");
  options.def(py::init<>()).def("validate", &validate);
  for_each_option([property = Properties{options}](const char* name, auto member, auto /*rule*/) {
    property(name, member);
  });
  module.def("name_fits", &fits);
  module.def("rank_of", [](const std::string& name, const Options& options) {
    return rank_of(name, options.matrix_ranks);
  });
  module.attr("max_rank") = kMaxRank;
}

}  // namespace powersgd
