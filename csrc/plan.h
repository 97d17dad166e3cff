// The operators sum_plan and spread_plan of shardsum/local/kernels.py: one sum as a plan describes it, and its adjoint.
//
// A plan is a CPU int64 tensor that shardsum/local/plan.py makes and checks once: everything about a sum but its
// tensors. The operators check what depends on the tensors: no call reads or writes foreign memory, and none is
// answered with another sum than the plan's. What they refuse (RuntimeError) Python looks at again and names.
#pragma once
#include <cmath>
#include <deque>

#include "sums.h"

namespace shardsum {

constexpr int64_t kPlanVersion = 1;

// Rows [first, first + length) of one shard, at the positions from `start` on.
struct PlanRow {
  int64_t start;
  int64_t first;
  int64_t length;
};

// The tensor's words, in this order; then a PlanRow for each shard.
struct PlanHeader {
  int64_t version;
  int64_t size;       // positions of the result; -1: as many as the longest shard has rows
  int64_t capacity;   // rows of the longest shard; -1: any that suffice
  int64_t out_dtype;  // a DType; -1: out's, and of a new result the shards', int64 for integers and bool
  int64_t mean;
  int64_t has_scale;
  double scale;
  int64_t accumulate;
  int64_t num_rows;  // 0: whole shards, however many, all from position 0
};

// Borrows the memory of its tensor.
class SumPlan {
 public:
  explicit SumPlan(const TensorView& plan) {
    constexpr int64_t kWords = sizeof(PlanHeader) / sizeof(int64_t), kRowWords = sizeof(PlanRow) / sizeof(int64_t);
    SHARDSUM_CHECK(Cpu::owns(plan) && plan.dtype_code() == aoti_torch_dtype_int64() && plan.dim() == 1 &&
                       plan.is_contiguous() && plan.size(0) >= kWords,
                   "this is not a plan");
    const auto* words = static_cast<const int64_t*>(plan.data());
    __builtin_memcpy(&header_, words, sizeof(header_));
    SHARDSUM_CHECK(header_.version == kPlanVersion, "this plan is of another version of the library");
    const int64_t row_words = plan.size(0) - kWords;
    SHARDSUM_CHECK(row_words % kRowWords == 0 && header_.num_rows == row_words / kRowWords,
                   "the plan has another number of rows than it says");
    rows_ = reinterpret_cast<const PlanRow*>(words + kWords);
  }
  bool has_rows() const { return header_.num_rows > 0; }
  bool accumulates() const { return header_.accumulate != 0; }
  int64_t size(int64_t longest) const { return header_.size < 0 ? longest : header_.size; }
  int32_t out_dtype_code(const TensorView& shard) const {
    return header_.out_dtype < 0 ? sum_dtype_code(shard) : dtype_code(header_.out_dtype);
  }
  Finish finish() const {
    Finish finish;
    finish.mean = header_.mean != 0, finish.has_scale = header_.has_scale != 0, finish.scale = header_.scale;
    finish.accumulate = accumulates();
    return finish;
  }

  void check_number(int64_t num_shards) const {
    SHARDSUM_CHECK(num_shards > 0 && (!has_rows() || num_shards == header_.num_rows),
                   "the plan is for another number of shards");
  }
  void check(const TensorView& shard, int64_t num_shards, int64_t longest) const {
    check_number(num_shards);
    SHARDSUM_CHECK(header_.capacity < 0 || header_.capacity == longest,
                   "the plan is for shards of another number of rows");
    const DType dtype = dtype_of(shard);
    SHARDSUM_CHECK(is_floating(dtype) || !(header_.mean || header_.has_scale), "no mean or scale of integers");
    const double scale = dtype == DType::kFloat64 ? header_.scale : static_cast<float>(header_.scale);
    SHARDSUM_CHECK(std::isfinite(scale) || !std::isfinite(header_.scale),
                   "the scale is beyond the accumulator's dtype");
  }
  void check_dtype(const TensorView& out) const {
    SHARDSUM_CHECK(header_.out_dtype < 0 || out.dtype_code() == dtype_code(header_.out_dtype),
                   "out has another dtype than the plan's");
  }

  // Row r of a sum of shards of `capacity` rows to `size` positions.
  PlanRow row(int64_t r, int64_t capacity, int64_t size) const {
    const PlanRow row = has_rows() ? rows_[r] : PlanRow{0, 0, capacity};
    SHARDSUM_CHECK(row.first >= 0 && row.length >= 0 && row.first <= capacity - row.length, "shard ", r,
                   " has fewer rows than the plan takes");
    SHARDSUM_CHECK(row.start >= 0 && row.start <= size - row.length, "shard ", r, " ends beyond the result");
    return row;
  }
  // The same as a row of a kernel's table, from the shard at `data`.
  Row row(int64_t r, const void* data, int64_t capacity, const SumArgs& args) const {
    const PlanRow row = this->row(r, capacity, args.size);
    if (row.length == 0) return {nullptr, 0, 0};
    const char* at = static_cast<const char*>(data) + row.first * args.width * element_size(args.in_dtype);
    return {at, row.start * args.width, (row.start + row.length) * args.width};
  }

 private:
  PlanHeader header_;
  const PlanRow* rows_;
};

// A tensor argument of any layout.
class AnyLayout {
 public:
  explicit AnyLayout(StableIValue value) : given_(value) {}
  TensorView view() const { return given_.view(); }
  // It, or a copy of which dimensions first, first + 1, ... lie contiguous in memory.
  TensorView contiguous_from(int64_t first) {
    if (view().is_contiguous_from(first)) return view();
    copy_.emplace(contiguous_copy(view()));
    return copy_->view();
  }

 private:
  TensorArg given_;
  std::optional<TensorArg> copy_;
};

// The three forms of shards. Each takes its arguments from the stack, and has
//   like()     a tensor with the shards' dtype and device, and the trailing shape behind kLeading dimensions
//   check()    that they are of this device and of one kind
//   apart()    that `out` shares no memory with them
//   sum()      the sum itself; where their layout is not one that a kernel reads, of a copy

// Tensor x (R, S_MAX, *F)
template <class Device>
struct PaddedShards {
  static constexpr int64_t kLeading = 2;
  explicit PaddedShards(StableIValue*& next) : x(*next++) {}
  TensorView like() const { return x.view(); }
  int64_t count() const { return x.view().size(0); }
  int64_t longest() const { return x.view().size(1); }
  void check() const {
    const TensorView view = x.view();
    SHARDSUM_CHECK(Device::owns(view) && view.dim() >= 2, "x is not (R, S_MAX, *F)");
  }
  bool apart(const TensorView& out) const { return !overlap(out, x.view()); }
  void sum(const SumPlan& plan, const TensorView& out, const SumArgs& args) {
    const TensorView view = x.contiguous_from(1);
    const char* data = static_cast<const char*>(view.data());
    const int64_t row_bytes = view.stride(0) * element_size(args.in_dtype), capacity = view.size(1);
    Table<Row> rows(args.num_rows);
    for (int64_t r = 0; r < args.num_rows; ++r) rows[r] = plan.row(r, data + r * row_bytes, capacity, args);
    if (args.size * args.width > 0) Device(out).sum_rows(args, rows.data());
  }

  AnyLayout x;
};

// Tensor[] shards (capacity_r, *F)
template <class Device>
struct ListedShards {
  static constexpr int64_t kLeading = 1;
  explicit ListedShards(StableIValue*& next) : shards(*next++) {}
  TensorView like() const { return shards[0]; }
  int64_t count() const { return shards.size(); }
  int64_t longest() const {
    int64_t longest = 0;
    for (int64_t r = 0; r < count(); ++r) longest = std::max(longest, shards[r].size(0));
    return longest;
  }
  void check() const {
    SHARDSUM_CHECK(count() > 0, "no shards");
    const TensorView first = like();
    for (int64_t r = 0; r < count(); ++r) {
      const TensorView shard = shards[r];
      bool same = shard.dim() >= 1 && shard.dim() == first.dim() && shard.dtype_code() == first.dtype_code() &&
                  Device::owns(shard) && shard.device_index() == first.device_index();
      for (int64_t d = 1; same && d < shard.dim(); ++d) same = shard.size(d) == first.size(d);
      SHARDSUM_CHECK(same, "shard ", r, " differs from the first in trailing shape, dtype or device");
    }
  }
  bool apart(const TensorView& out) const {
    for (int64_t r = 0; r < count(); ++r)
      if (overlap(out, shards[r])) return false;
    return true;
  }
  TensorView contiguous(int64_t r) {
    if (shards[r].is_contiguous_from(0)) return shards[r];
    copies.emplace_back(contiguous_copy(shards[r]));
    return copies.back().view();
  }
  void sum(const SumPlan& plan, const TensorView& out, const SumArgs& args) {
    Table<Row> rows(args.num_rows);
    for (int64_t r = 0; r < args.num_rows; ++r) rows[r] = plan.row(r, contiguous(r).data(), shards[r].size(0), args);
    if (args.size * args.width > 0) Device(out).sum_rows(args, rows.data());
  }

  TensorListArg shards;
  std::deque<TensorArg> copies;
};

// Tensor x as above, Tensor mask: bool (R, S_MAX), or int32 words (R, ceil(S_MAX / 32)). The plan has no rows.
template <class Device>
struct MaskedShards : PaddedShards<Device> {
  explicit MaskedShards(StableIValue*& next) : PaddedShards<Device>(next), mask(*next++) {}
  bool apart(const TensorView& out) const { return PaddedShards<Device>::apart(out) && !overlap(out, mask.view()); }
  void sum(const SumPlan& plan, const TensorView& out, const SumArgs& args) {
    const TensorView view = this->x.contiguous_from(1), m = mask.contiguous_from(1);
    const bool bits = m.dtype_code() == aoti_torch_dtype_int32();
    SHARDSUM_CHECK(bits || m.dtype_code() == aoti_torch_dtype_bool(), "mask is neither bool nor int32");
    SHARDSUM_CHECK(Device::owns(m) && m.device_index() == view.device_index(), "mask is on another device");
    SHARDSUM_CHECK(!plan.has_rows() && view.size(1) == args.size && m.dim() == 2 && m.size(0) == view.size(0) &&
                       m.size(1) == (bits ? (args.size + 31) / 32 : args.size),
                   "mask does not fit x");
    if (args.size * args.width > 0)
      Device(out).sum_masked(args, view.data(), view.stride(0), Mask{m.data(), m.stride(0), bits});
  }

  AnyLayout mask;
};

inline StableIValue new_result(const TensorView& like, int64_t leading, int64_t size, int32_t dtype_code) {
  Table<int64_t, 16> sizes(1 + like.dim() - leading);
  sizes[0] = size;
  std::copy(like.sizes() + leading, like.sizes() + like.dim(), sizes.data() + 1);
  return empty_on(like, sizes.data(), sizes.size(), dtype_code);
}

inline void check_result(const TensorView& out, const TensorView& like, int64_t leading, int64_t size) {
  SHARDSUM_CHECK(out.device_type() == like.device_type() && out.device_index() == like.device_index(),
                 "out is on another device");
  bool same = out.dim() == 1 + like.dim() - leading && out.size(0) == size;
  for (int64_t d = 1; same && d < out.dim(); ++d) same = out.size(d) == like.size(leading + d - 1);
  SHARDSUM_CHECK(same, "out has another shape than the result");
}

// sum_plan(Tensor(a!) out, ..., Tensor plan) -> ()
template <class Device, template <class> class Shards>
void sum_plan(StableIValue* stack, uint64_t, uint64_t) {
  const TensorArg out_arg(*stack++);
  Shards<Device> shards(stack);
  const TensorArg plan_arg(*stack);
  const SumPlan plan(plan_arg.view());
  shards.check();
  const TensorView out = out_arg.view(), like = shards.like();
  const int64_t longest = shards.longest();
  plan.check(like, shards.count(), longest);
  plan.check_dtype(out);
  check_result(out, like, Shards<Device>::kLeading, plan.size(longest));
  SHARDSUM_CHECK(shards.apart(out), "out shares memory with the shards");
  shards.sum(plan, out, describe(out, like, shards.count(), plan.finish()));
}

// sum_plan_new(..., Tensor plan) -> Tensor
template <class Device, template <class> class Shards>
void sum_plan_new(StableIValue* stack, uint64_t, uint64_t) {
  StableIValue* next = stack;
  Shards<Device> shards(next);
  const TensorArg plan_arg(*next);
  const SumPlan plan(plan_arg.view());
  shards.check();
  const TensorView like = shards.like();
  const int64_t longest = shards.longest();
  plan.check(like, shards.count(), longest);
  SHARDSUM_CHECK(!plan.accumulates(), "nothing to add to");
  TensorArg out(new_result(like, Shards<Device>::kLeading, plan.size(longest), plan.out_dtype_code(like)));
  shards.sum(plan, out.view(), describe(out.view(), like, shards.count(), plan.finish()));
  stack[0] = out.release();
}

// spread_plan(Tensor x, Tensor plan, int num_shards, int capacity) -> Tensor
template <class Device>
void spread_plan(StableIValue* stack, uint64_t, uint64_t) {
  AnyLayout given(stack[0]);
  const TensorArg plan_arg(stack[1]);
  const int64_t num_shards = torch::stable::detail::to<int64_t>(stack[2]);
  const int64_t capacity = torch::stable::detail::to<int64_t>(stack[3]);
  const SumPlan plan(plan_arg.view());
  SHARDSUM_CHECK(Device::owns(given.view()) && given.view().dim() >= 1, "x is not (size, *F)");
  const TensorView x = given.contiguous_from(0);
  SHARDSUM_CHECK(capacity >= 0 && x.size(0) == plan.size(capacity), "x has another size than the plan");
  plan.check_number(num_shards);
  Table<int64_t, 16> sizes(x.dim() + 1);
  sizes[0] = num_shards, sizes[1] = capacity;
  std::copy(x.sizes() + 1, x.sizes() + x.dim(), sizes.data() + 2);
  TensorArg out(empty_on(x, sizes.data(), sizes.size(), x.dtype_code()));
  SpreadArgs args{x.data(), out.view().mutable_data(), 0, num_shards, 0};
  args.position_bytes = x.width() * static_cast<int64_t>(aoti_torch_dtype_element_size(x.dtype_code()));
  args.row_bytes = capacity * args.position_bytes;
  Table<SpreadRow> rows(num_shards);
  for (int64_t r = 0; r < num_shards; ++r) {
    const PlanRow row = plan.row(r, capacity, x.size(0));
    rows[r] = {row.start * args.position_bytes, row.first * args.position_bytes,
               (row.first + row.length) * args.position_bytes};
  }
  if (args.row_bytes > 0) Device(x).spread(args, rows.data());
  stack[0] = out.release();
}

}  // namespace shardsum
