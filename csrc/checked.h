// The operators sum_checked and sum_checked_new of shardsum/local/kernels.py: their checks are all there are, and an error
// sends Python to its own. What is no tensor is pending (python_calls.h).
#pragma once
#include "python_calls.h"
#include "sums.h"

namespace shardsum {

// What sum_padded trusts its caller with, where the result has x's positions and all rows start at 0.
template <class Device>
void check_sum(const TensorView& x, const Pending& call) {
  STD_TORCH_CHECK(Device::owns(x) && x.dim() >= 2 && x.size(0) > 0, "shardsum: x is not (R, S_MAX, *F)");
  STD_TORCH_CHECK(x.size(0) == call.num_lengths, "shardsum: x and lengths differ in rows");
  STD_TORCH_CHECK(call.size < 0 || call.size == x.size(1), "shardsum: another size than x has positions");
  STD_TORCH_CHECK(is_floating(dtype_of(x)) || !(call.finish.mean || call.finish.has_scale),
                  "shardsum: no mean of integers");
}

template <class Device>
void check_out(const TensorView& out, const TensorView& x) {
  STD_TORCH_CHECK(Device::owns(out) && out.device_index() == x.device_index(), "shardsum: out is on another device");
  bool same = out.dim() == x.dim() - 1;
  for (int64_t d = 0; same && d < out.dim(); ++d) same = out.size(d) == x.size(d + 1);
  STD_TORCH_CHECK(same, "shardsum: out has another shape than the result");
  STD_TORCH_CHECK(!overlap(out, x), "shardsum: out shares memory with x");
}

// Owns a `Tensor` argument that holds lengths like an IntListArg.
class IntTensorArg {
 public:
  explicit IntTensorArg(StableIValue value) : tensor_(value), view_(tensor_.view()) {
    STD_TORCH_CHECK(Cpu::owns(view_) && view_.dtype_code() == aoti_torch_dtype_int64(),
                    "shardsum: no CPU int64 lengths");
    STD_TORCH_CHECK(view_.dim() == 1 && view_.is_contiguous(), "shardsum: lengths are not in a row");
  }
  int64_t size() const { return view_.size(0); }
  const int64_t* data() const { return static_cast<const int64_t*>(view_.data()); }

 private:
  TensorArg tensor_;
  TensorView view_;
};

// Takes the call that is pending, with the lengths of a tensor where it has none.
template <bool kTensor>
Pending take_with_lengths(const std::optional<IntTensorArg>& lengths) {
  Pending call = take_pending();
  STD_TORCH_CHECK((call.lengths == nullptr) == kTensor, "shardsum: lengths are in a list or in a tensor");
  if (kTensor) call.lengths = lengths->data(), call.num_lengths = lengths->size();
  return call;
}

// sum_checked(Tensor(a!) out, Tensor x) -> (), and with (..., Tensor lengths)
template <class Device, bool kTensor>
void sum_checked(StableIValue* stack, uint64_t, uint64_t) {
  const TensorArg out_arg(stack[0]), x_arg(stack[1]);
  std::optional<IntTensorArg> lengths;
  if (kTensor) lengths.emplace(stack[2]);
  const Pending call = take_with_lengths<kTensor>(lengths);
  const TensorView out = out_arg.view(), x = x_arg.view();
  check_sum<Device>(x, call);
  check_out<Device>(out, x);
  sum_padded_rows<Device>(out, x, nullptr, call.lengths, call.finish);
}

// sum_checked_new(Tensor x) -> Tensor, and with (..., Tensor lengths)
template <class Device, bool kTensor>
void sum_checked_new(StableIValue* stack, uint64_t, uint64_t) {
  const TensorArg x_arg(stack[0]);
  std::optional<IntTensorArg> lengths;
  if (kTensor) lengths.emplace(stack[1]);
  const Pending call = take_with_lengths<kTensor>(lengths);
  const TensorView x = x_arg.view();
  check_sum<Device>(x, call);
  TensorArg out(empty_on(x, x.sizes() + 1, x.dim() - 1, sum_dtype_code(x)));
  sum_padded_rows<Device>(out.view(), x, nullptr, call.lengths, call.finish);
  stack[0] = out.release();
}

// Fills the table with the shards of a list, all of which start at 0; returns the longest one's length.
template <class Device>
int64_t list_shards(TensorListArg& shards, const Finish& finish, Table<Row>& table) {
  STD_TORCH_CHECK(shards.size() > 0, "shardsum: no shards");
  const TensorView first = shards[0];
  STD_TORCH_CHECK(is_floating(dtype_of(first)) || !(finish.mean || finish.has_scale), "shardsum: no mean of integers");
  const int64_t width = first.width();
  int64_t longest = 0;
  for (int64_t r = 0; r < shards.size(); ++r) {
    const TensorView shard = shards[r];
    bool same = shard.dim() >= 1 && shard.dim() == first.dim() && shard.dtype_code() == first.dtype_code() &&
                Device::owns(shard) && shard.device_index() == first.device_index();
    for (int64_t d = 1; same && d < shard.dim(); ++d) same = shard.size(d) == first.size(d);
    STD_TORCH_CHECK(same, "shardsum: shard ", r, " differs from the first in trailing shape, dtype or device");
    STD_TORCH_CHECK(shard.is_contiguous(), "shardsum: shard ", r, " is not contiguous");
    const int64_t length = shard.size(0);
    longest = std::max(longest, length);
    table[r] = length > 0 ? Row{shard.data(), 0, length * width} : Row{nullptr, 0, 0};
  }
  return longest;
}

inline void check_apart(const SumArgs& args, const Row* rows) {
  const int64_t out_bytes = args.size * args.width * element_size(args.out_dtype);
  for (int64_t r = 0; r < args.num_rows; ++r)
    STD_TORCH_CHECK(!overlap(args.out, out_bytes, rows[r].data, rows[r].end * element_size(args.in_dtype)),
                    "shardsum: out shares memory with shard ", r);
}

// sum_checked.list(Tensor(a!) out, Tensor[] shards) -> (); size -1: the longest shard's
template <class Device>
void sum_checked_list(StableIValue* stack, uint64_t, uint64_t) {
  const TensorArg out_arg(stack[0]);
  TensorListArg shards(stack[1]);
  const Pending call = take_pending();
  const TensorView out = out_arg.view();
  Table<Row> rows(shards.size());
  const int64_t longest = list_shards<Device>(shards, call.finish, rows);
  const TensorView first = shards[0];
  STD_TORCH_CHECK(Device::owns(out) && out.device_index() == first.device_index(),
                  "shardsum: out is on another device");
  const SumArgs args = describe(out, first, shards.size(), call.finish);
  bool same = out.dim() == first.dim() && args.size == (call.size < 0 ? longest : call.size) && args.size >= longest;
  for (int64_t d = 1; same && d < out.dim(); ++d) same = out.size(d) == first.size(d);
  STD_TORCH_CHECK(same, "shardsum: out has another shape than the result");
  check_apart(args, rows.data());
  if (args.size * args.width > 0) Device(out).sum_rows(args, rows.data());
}

// sum_checked_new.list(Tensor[] shards) -> Tensor
template <class Device>
void sum_checked_new_list(StableIValue* stack, uint64_t, uint64_t) {
  TensorListArg shards(stack[0]);
  const Finish finish = take_pending().finish;
  Table<Row> rows(shards.size());
  const int64_t longest = list_shards<Device>(shards, finish, rows);
  const TensorView first = shards[0];
  Table<int64_t, 16> sizes(first.dim());
  std::copy(first.sizes(), first.sizes() + first.dim(), sizes.data());
  sizes[0] = longest;
  TensorArg out(empty_on(first, sizes.data(), first.dim(), sum_dtype_code(first)));
  const SumArgs args = describe(out.view(), first, shards.size(), finish);
  if (args.size * args.width > 0) Device(out.view()).sum_rows(args, rows.data());
  stack[0] = out.release();
}

}  // namespace shardsum
