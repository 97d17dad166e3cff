// A table that is on the stack up to a usual number of rows.
#pragma once
#include <cstdint>
#include <memory>

namespace shardsum {

// A fixed number of trivially copyable elements, uninitialised.
template <class T, int64_t kInline = 64>
class Table {
 public:
  explicit Table(int64_t size) : size_(size), heap_(size > kInline ? new T[size] : nullptr) {}
  T* data() { return heap_ ? heap_.get() : inline_; }
  const T* data() const { return heap_ ? heap_.get() : inline_; }
  T& operator[](int64_t i) { return data()[i]; }
  const T& operator[](int64_t i) const { return data()[i]; }
  int64_t size() const { return size_; }

 private:
  int64_t size_;
  std::unique_ptr<T[]> heap_;
  T inline_[kInline];
};

}  // namespace shardsum
