// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "powersgd/kernels/kernels.h"

// The cases of bench_kernels.cu, and the arguments that select them.
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
  int64_t in_front = 0;  // elements of an uncompressed parameter before the matrices

  int64_t numel() const {
    int64_t sum = 0;
    for (const Shape& shape : shapes) sum += shape.rows * shape.cols;
    return sum;
  }
};

inline const std::vector<Shape> kGpt2 = {{3072, 768}, {768, 3072}, {2304, 768}, {768, 768}};

inline std::vector<Shape> repeated(const std::vector<Shape>& shapes, int times) {
  std::vector<Shape> out;
  for (int i = 0; i < times; ++i) out.insert(out.end(), shapes.begin(), shapes.end());
  return out;
}

inline const std::vector<Shape> kLlama = {{4096, 4096}, {4096, 4096}, {11008, 4096}, {4096, 11008}};

inline const std::vector<Layout> kLayouts = {
    {"square", "25 MB square", std::vector<Shape>(6, {1024, 1024})},
    {"gpt2", "25 MB GPT-2", kGpt2},
    {"gpt2x4", "100 MB GPT-2", repeated(kGpt2, 4)},
    {"resnet50", "25 MB ResNet-50", {{512, 4608}, {2048, 512}, {512, 2048}, {1000, 2048}}},
    {"embedding", "GPT-2 embedding", {{50257, 768}}},
    {"llama", "Llama-7B layer", kLlama},
    // A scalar in front shifts the matrices' gradients off their alignment.
    {"gpt2x4+1", "100 MB GPT-2 + 1", repeated(kGpt2, 4), 1},
    {"llama+1", "Llama-7B + 1", kLlama, 1},
};

// The rank of a deficient gradient is half the matrix rank, as with small batches. orthogonalize
// then takes its slow path.
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

// The bytes that a step must read and write, as in bench_stages.py. project reads G
// and memory and writes memory, back_project reads memory, reconstruct writes G.
inline int64_t floor_bytes(int64_t numel, const Kind& kind) {
  return numel * (2 * bytes_of(kind.gradient) + 3 * bytes_of(kind.residual));
}

// The dtype in which project and back_project multiply; see Bucket::bfloat16_products.
struct Products {
  std::string name;
  bool bfloat16;
};

inline const std::vector<Products> kProducts = {{"float32", false}, {"bfloat16", true}};

struct Case {
  const Layout* layout;
  const Kind* kind;
  int64_t rank;
  const Products* products;
};

struct Row {
  Case measured;
  double stage[4], step, floor;  // milliseconds per bucket
  double launches;               // per bucket
  int skipped;                   // buckets whose step was not finite: a defect
};

struct Arguments {
  std::string json;
  std::set<std::string> models, kinds;  // empty: all
  std::vector<int64_t> ranks;           // empty: those of the kind
  std::vector<const Products*> products = {&kProducts[0]};

  static Arguments parse(int count, char** words) {
    Arguments out;
    std::vector<const Products*> products;
    std::string option;
    for (int i = 1; i < count; ++i) {
      const std::string word = words[i];
      if (word.rfind("--", 0) == 0)
        option = word;
      else if (option == "--json")
        out.json = word;
      else if (option == "--models")
        out.models.insert(known(word, kLayouts)->name);
      else if (option == "--kinds")
        out.kinds.insert(known(word, kKinds)->name);
      else if (option == "--products")
        products.push_back(known(word, kProducts));
      else if (option == "--ranks" && std::atoi(word.c_str()) > 0 &&
               std::atoi(word.c_str()) <= kernels::cuda::kMaxRank)
        out.ranks.push_back(std::atoi(word.c_str()));
      else
        usage();
      if (word == option && !kOptions.count(option)) usage();
    }
    if (!products.empty()) out.products = products;
    return out;
  }

 private:
  inline static const std::set<std::string> kOptions = {"--json", "--models", "--kinds", "--ranks",
                                                        "--products"};

  template <typename T>
  static const T* known(const std::string& name, const std::vector<T>& all) {
    for (const T& each : all) {
      if (each.name == name) return &each;
    }
    usage();
  }
  [[noreturn]] static void usage() {
    std::string text = "usage: bench_kernels [--json FILE] [--ranks N ...]\n  [--models";
    for (const Layout& layout : kLayouts) text += " " + layout.name;
    text += "]\n  [--kinds";
    for (const Kind& kind : kKinds) text += " " + kind.name;
    text += "]\n  [--products";
    for (const Products& products : kProducts) text += " " + products.name;
    fail(text + "]", 2);
  }
};

}  // namespace powersgd::bench
