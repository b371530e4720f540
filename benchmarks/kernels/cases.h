// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "powersgd/options.h"

// The cases that bench_kernels.cu measures, and its arguments, which choose among them.
namespace powersgd::bench {

[[noreturn]] inline void fail(const std::string& why, int status = 1) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::exit(status);
}

struct Shape {
  int64_t rows, cols;
};

struct Layout {
  std::string name, title;
  std::vector<Shape> shapes;

  int64_t numel() const {
    int64_t sum = 0;
    for (const Shape& shape : shapes) sum += shape.rows * shape.cols;
    return sum;
  }
};

inline const std::vector<Layout> kLayouts = {
    {"square", "25 MB square", std::vector<Shape>(6, {1024, 1024})},
    {"gpt2", "25 MB GPT-2", {{3072, 768}, {768, 3072}, {2304, 768}, {768, 768}}},
    {"resnet50", "25 MB ResNet-50", {{512, 4608}, {2048, 512}, {512, 2048}, {1000, 2048}}},
    {"embedding", "GPT-2 embedding", {{50257, 768}}},
    {"llama", "Llama-7B layer", {{4096, 4096}, {4096, 4096}, {11008, 4096}, {4096, 11008}}},
};

// A deficient gradient has half the rank of the approximation, as those of small batches do.
// orthogonalize then takes the slow way.
struct Kind {
  std::string name;
  DType gradient, residual;
  bool deficient;
  std::vector<int64_t> ranks;  // unless --ranks names others
};

inline const std::vector<Kind> kKinds = {
    {"float32", DType::kFloat32, DType::kFloat32, false, {1, 2, 4, 8, 16, 32}},
    {"bfloat16", DType::kBFloat16, DType::kFloat32, false, {4, 16}},
    {"bfloat16/bfloat16", DType::kBFloat16, DType::kBFloat16, false, {4, 16}},
    {"deficient", DType::kFloat32, DType::kFloat32, true, {4, 32}},
};

inline int64_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

struct Row {
  const Layout* layout;
  const Kind* kind;
  int64_t rank;
  double stage[4], step, floor;  // milliseconds per bucket
  double launches;               // per bucket
  int skipped;                   // buckets whose step came out as not finite: a defect
};

struct Arguments {
  std::string json;
  std::set<std::string> models, kinds;  // empty: all
  std::vector<int64_t> ranks;           // empty: those of the kind

  static Arguments parse(int count, char** words) {
    Arguments out;
    std::string option;
    for (int i = 1; i < count; ++i) {
      const std::string word = words[i];
      if (word.rfind("--", 0) == 0)
        option = word;
      else if (option == "--json")
        out.json = word;
      else if (option == "--models")
        out.models.insert(checked(word, kLayouts));
      else if (option == "--kinds")
        out.kinds.insert(checked(word, kKinds));
      else if (option == "--ranks" && std::atoi(word.c_str()) > 0)
        out.ranks.push_back(std::atoi(word.c_str()));
      else
        usage();
      if (word == option && !kOptions.count(option)) usage();
    }
    return out;
  }

 private:
  inline static const std::set<std::string> kOptions = {"--json", "--models", "--kinds", "--ranks"};

  template <typename T>
  static std::string checked(const std::string& word, const std::vector<T>& known) {
    for (const T& each : known) {
      if (each.name == word) return word;
    }
    usage();
  }
  [[noreturn]] static void usage() {
    std::string text = "usage: bench_kernels [--json FILE] [--ranks N ...]\n  [--models";
    for (const Layout& layout : kLayouts) text += " " + layout.name;
    text += "]\n  [--kinds";
    for (const Kind& kind : kKinds) text += " " + kind.name;
    fail(text + "]", 2);
  }
};

}  // namespace powersgd::bench
