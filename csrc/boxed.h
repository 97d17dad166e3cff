// The arguments of a boxed operator (PyTorch's stable ABI), read without touching the heap.
//
// A boxed kernel owns every argument it is given. Each type here takes one over and gives it back at the end of
// the scope: a Tensor is one handle, a list is read once into a table on the stack (the heap beyond kInline).
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "check.h"
#include "table.h"

namespace shardsum {

inline void check(AOTITorchError code, const char* what) { SHARDSUM_CHECK(code == TORCH_SUCCESS, what, " failed"); }

// What the kernels need to know of one tensor; borrowed.
class TensorView {
 public:
  explicit TensorView(AtenTensorHandle handle) : handle_(handle) {
    check(aoti_torch_get_sizes(handle, &sizes_), "sizes");
    check(aoti_torch_get_dim(handle, &dim_), "dim");
  }
  AtenTensorHandle handle() const { return handle_; }
  int64_t dim() const { return dim_; }
  const int64_t* sizes() const { return sizes_; }
  int64_t size(int64_t d) const { return sizes_[d]; }
  int64_t stride(int64_t d) const {
    int64_t* strides = nullptr;
    check(aoti_torch_get_strides(handle_, &strides), "strides");
    return strides[d];
  }
  // Elements per index of the first `leading` dimensions.
  int64_t width(int64_t leading = 1) const {
    int64_t n = 1;
    for (int64_t d = leading; d < dim_; ++d) n *= sizes_[d];
    return n;
  }
  bool is_contiguous() const {
    bool yes = false;
    check(aoti_torch_is_contiguous(handle_, &yes), "is_contiguous");
    return yes;
  }
  // Dimensions first, first + 1, ... lie contiguous in memory; those of no elements do with any strides.
  bool is_contiguous_from(int64_t first) const {
    if (std::find(sizes_ + first, sizes_ + dim_, 0) != sizes_ + dim_) return true;
    int64_t* strides = nullptr;
    check(aoti_torch_get_strides(handle_, &strides), "strides");
    if (width(first) == 0) return true;
    int64_t expected = 1;
    for (int64_t d = dim_ - 1; d >= first; --d) {
      if (sizes_[d] != 1 && strides[d] != expected) return false;
      expected *= sizes_[d];
    }
    return true;
  }
  // From data() on; 0 without elements.
  int64_t spanned_bytes() const {
    int64_t* strides = nullptr;
    check(aoti_torch_get_strides(handle_, &strides), "strides");
    int64_t last = 0;
    for (int64_t d = 0; d < dim_; ++d) {
      if (sizes_[d] == 0) return 0;
      last += (sizes_[d] - 1) * strides[d];
    }
    return (last + 1) * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype_code()));
  }
  int32_t dtype_code() const {
    int32_t code = 0;
    check(aoti_torch_get_dtype(handle_, &code), "dtype");
    return code;
  }
  int32_t device_type() const {
    int32_t type = 0;
    check(aoti_torch_get_device_type(handle_, &type), "device type");
    return type;
  }
  int32_t device_index() const {
    int32_t index = 0;
    check(aoti_torch_get_device_index(handle_, &index), "device index");
    return index;
  }
  const void* data() const {
    const void* data = nullptr;
    check(torch_get_const_data_ptr(handle_, &data), "data pointer");
    return data;
  }
  void* mutable_data() const {
    void* data = nullptr;
    check(torch_get_mutable_data_ptr(handle_, &data), "data pointer");
    return data;
  }

 private:
  AtenTensorHandle handle_;
  int64_t* sizes_ = nullptr;
  int64_t dim_ = 0;
};

// Whether two stretches of memory intersect.
inline bool overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const auto a_at = reinterpret_cast<uintptr_t>(a), b_at = reinterpret_cast<uintptr_t>(b);
  return a_bytes > 0 && b_bytes > 0 && a_at < b_at + b_bytes && b_at < a_at + a_bytes;
}

// Whether the memory ranges that two tensors of one device span do.
inline bool overlap(const TensorView& a, const TensorView& b) {
  return overlap(a.data(), a.spanned_bytes(), b.data(), b.spanned_bytes());
}

// Owns one tensor argument.
class TensorArg {
 public:
  explicit TensorArg(StableIValue value) : handle_(torch::stable::detail::to<AtenTensorHandle>(value)) {}
  TensorArg(const TensorArg&) = delete;
  TensorArg& operator=(const TensorArg&) = delete;
  ~TensorArg() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  // Hands the tensor over as an operator's result.
  StableIValue release() {
    const StableIValue value = torch::stable::detail::from(handle_);
    handle_ = nullptr;
    return value;
  }
  AtenTensorHandle handle() const { return handle_; }
  TensorView view() const { return TensorView(handle_); }

 private:
  AtenTensorHandle handle_;
};

inline int64_t list_size(StableListHandle list) {
  size_t size = 0;
  check(torch_list_size(list, &size), "list size");
  return static_cast<int64_t>(size);
}

// Owns a `Tensor[]` argument and the tensors in it.
class TensorListArg {
 public:
  explicit TensorListArg(StableIValue value)
      : list_(torch::stable::detail::to<StableListHandle>(value)), handles_(list_size(list_)) {
    for (; owned_ < handles_.size(); ++owned_) {
      StableIValue item = 0;
      check(torch_list_get_item(list_, owned_, &item), "list item");
      handles_[owned_] = torch::stable::detail::to<AtenTensorHandle>(item);
    }
  }
  TensorListArg(const TensorListArg&) = delete;
  TensorListArg& operator=(const TensorListArg&) = delete;
  ~TensorListArg() {
    for (int64_t i = 0; i < owned_; ++i) aoti_torch_delete_tensor_object(handles_[i]);
    torch_delete_list(list_);
  }
  int64_t size() const { return handles_.size(); }
  TensorView operator[](int64_t i) const { return TensorView(handles_[i]); }

 private:
  StableListHandle list_;
  Table<AtenTensorHandle> handles_;
  int64_t owned_ = 0;
};

// A `Tensor[]` result of a known size; owns the tensors that were appended.
class TensorListResult {
 public:
  explicit TensorListResult(int64_t size) : handles_(size) {}
  TensorListResult(const TensorListResult&) = delete;
  TensorListResult& operator=(const TensorListResult&) = delete;
  ~TensorListResult() {
    for (int64_t i = given_; i < owned_; ++i) aoti_torch_delete_tensor_object(handles_[i]);
    if (list_ != nullptr) torch_delete_list(list_);
  }
  void append(StableIValue tensor) { handles_[owned_++] = torch::stable::detail::to<AtenTensorHandle>(tensor); }
  // Hands list and tensors over as an operator's result.
  StableIValue release() {
    check(torch_new_list_reserve_size(static_cast<size_t>(owned_), &list_), "list");
    for (; given_ < owned_; ++given_)
      check(torch_list_push_back(list_, torch::stable::detail::from(handles_[given_])), "list append");
    const StableIValue value = torch::stable::detail::from(list_);
    list_ = nullptr;
    return value;
  }

 private:
  Table<AtenTensorHandle> handles_;
  int64_t owned_ = 0, given_ = 0;  // appended; of these, the list's
  StableListHandle list_ = nullptr;
};

// Owns an `int[]` argument.
class IntListArg {
 public:
  explicit IntListArg(StableIValue value)
      : list_(torch::stable::detail::to<StableListHandle>(value)), values_(list_size(list_)) {
    for (int64_t i = 0; i < values_.size(); ++i) {
      StableIValue item = 0;
      check(torch_list_get_item(list_, i, &item), "list item");
      values_[i] = torch::stable::detail::to<int64_t>(item);
    }
  }
  IntListArg(const IntListArg&) = delete;
  IntListArg& operator=(const IntListArg&) = delete;
  ~IntListArg() { torch_delete_list(list_); }
  int64_t size() const { return values_.size(); }
  const int64_t* data() const { return values_.data(); }
  int64_t operator[](int64_t i) const { return data()[i]; }

 private:
  StableListHandle list_;
  Table<int64_t> values_;
};

// A `Tensor?` argument: a handle behind a heap cell of libtorch's, or null.
inline std::optional<StableIValue> take_optional(StableIValue value) {
  return torch::stable::detail::to<std::optional<StableIValue>>(value);
}

}  // namespace shardsum
