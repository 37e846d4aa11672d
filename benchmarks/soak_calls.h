#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "networks.h"
#include "soak_plan.h"

/// The calls in which failures strike: endless, and the same on all ranks of a group.
namespace lockstep::benchmarks {

/// A group of which one thread makes calls.
struct Lane {
  ProcessGroup group;
  std::vector<int> members;  // global ranks
  int rank = 0;              // global

  int64_t size() const { return static_cast<int64_t>(members.size()); }
};

/// The calls of one lane.
class Caller {
 public:
  virtual ~Caller() = default;
  /// Makes the next call. Throws what it throws.
  virtual void step() = 0;
  /// In place of a step, on the victim: a call that does not fit the others'.
  virtual void mismatch(Failure failure) = 0;
  /// The same step on another rank.
  virtual void meet_mismatch() { step(); }
  /// A further call, after an error.
  virtual void again(const ProcessGroup& group) { barrier(group); }
  /// The user's tensors that the last calls have used.
  virtual std::vector<at::Tensor> tensors() const = 0;
  /// The last call, and what mismatch() called, in the words of error messages.
  const std::string& last() const { return last_; }

 protected:
  std::string last_;
};

/// Tensors as a plan wants them.
class TensorMaker {
 public:
  /// `local`: differs by rank, for what may differ.
  TensorMaker(const SoakPlan& plan, const Lane& lane, Random& local)
      : plan_(plan), lane_(lane), local_(local) {}

  at::Tensor operator()(int64_t numel, at::ScalarType dtype) {
    Memory memory = plan_.memory;
    if (memory == Memory::kMixed) memory = static_cast<Memory>(draw(local_, 0, 2));
    at::Tensor tensor;
    if (memory == Memory::kPlain) {
      tensor = at::empty({numel}, dtype);
    } else if (memory == Memory::kView) {
      const int64_t front = draw(local_, 1, 70);
      tensor = empty_shared({front + numel + 3}, dtype, lane_.group).zero_().narrow(0, front, numel);
    } else {
      tensor = empty_shared({numel}, dtype, lane_.group);
    }
    return tensor.fill_(lane_.rank + 1);
  }

 private:
  const SoakPlan& plan_;
  const Lane& lane_;
  Random& local_;
};

inline int64_t draw_numel(Random& common, Size size) {
  if (size == Size::kSmall) return draw(common, 1, 500);
  return size == Size::kMedium ? draw(common, 4'000, 80'000) : draw(common, 200'000, 600'000);
}

constexpr std::array kDtypes = {at::kFloat, at::kDouble, at::kBFloat16, at::kInt, at::kLong, at::kByte};
constexpr std::array kCollectives = {
    "all_reduce",     "all_reduce_coalesced",   "reduce",     "broadcast",
    "all_gather",     "all_gather_into_tensor", "gather",     "scatter",
    "reduce_scatter", "reduce_scatter_tensor",  "all_to_all", "all_to_all_single",
    "barrier",        "sparse all_reduce"};
constexpr int64_t kReductions = 3;  // the first ones

/// Some elements of a vector, of which each rank has others at first.
inline at::Tensor make_sparse(int64_t numel, at::ScalarType dtype, int rank, TensorMaker& make) {
  const int64_t some = 1 + numel / 8;
  const at::Tensor places = at::arange(some, at::kLong).add_(rank % (numel - some + 1)).unsqueeze_(0);
  return at::sparse_coo_tensor(places, make(some, dtype), {numel});
}

/// One collective with its tensors.
struct Collective {
  std::string name;
  int64_t numel = 0;  // of the largest tensor
  at::ScalarType dtype = at::kFloat;
  int root = 0;  // global
  ReduceOp::RedOpType reduction = ReduceOp::SUM;
  std::vector<at::Tensor> inputs, outputs;

  bool is_sparse() const { return name == "sparse all_reduce"; }
  /// As error messages call it.
  std::string word() const { return is_sparse() ? "all_reduce" : name; }

  void make_tensors(const Lane& lane, TensorMaker& make) {
    const int64_t size = lane.size(), part = (numel + size - 1) / size;
    const auto one = [&](int64_t count) { return std::vector<at::Tensor>{make(count, dtype)}; };
    const auto parts = [&](int64_t number) {
      std::vector<at::Tensor> tensors;
      for (int64_t i = 0; i < number; ++i) tensors.push_back(make(part, dtype));
      return tensors;
    };
    const int64_t on_root = lane.rank == root ? size : 0;
    if (is_sparse()) inputs = {make_sparse(numel, dtype, lane.rank, make)};
    if (name == "all_reduce" || name == "reduce" || name == "broadcast") inputs = one(numel);
    if (name == "all_reduce_coalesced") inputs = parts(3);
    if (name == "all_gather" || name == "all_gather_into_tensor" || name == "gather") inputs = one(part);
    if (name == "all_gather") outputs = parts(size);
    if (name == "gather") outputs = parts(on_root);
    if (name == "all_gather_into_tensor") outputs = one(part * size);
    if (name == "scatter") inputs = parts(on_root);
    if (name == "reduce_scatter" || name == "all_to_all") inputs = parts(size);
    if (name == "reduce_scatter_tensor" || name == "all_to_all_single") inputs = one(part * size);
    if (name == "scatter" || name == "reduce_scatter" || name == "reduce_scatter_tensor") outputs = one(part);
    if (name == "all_to_all") outputs = parts(size);
    if (name == "all_to_all_single") outputs = one(part * size);
  }

  Work call(const ProcessGroup& group, bool async) const {
    if (is_sparse()) return all_reduce(inputs[0], ReduceOp::SUM, group, async);  // there is no other
    if (name == "all_reduce") return all_reduce(inputs[0], reduction, group, async);
    if (name == "all_reduce_coalesced") return all_reduce_coalesced(inputs, reduction, group, async);
    if (name == "reduce") return reduce(inputs[0], root, reduction, group, async);
    if (name == "broadcast") return broadcast(inputs[0], root, group, async);
    if (name == "all_gather") return all_gather(outputs, inputs[0], group, async);
    if (name == "all_gather_into_tensor") return all_gather_into_tensor(outputs[0], inputs[0], group, async);
    if (name == "gather") return gather(inputs[0], outputs, root, group, async);
    if (name == "scatter") return scatter(outputs[0], inputs, root, group, async);
    if (name == "reduce_scatter") return reduce_scatter(outputs[0], inputs, reduction, group, async);
    if (name == "reduce_scatter_tensor") {
      return reduce_scatter_tensor(outputs[0], inputs[0], reduction, group, async);
    }
    if (name == "all_to_all") return all_to_all(outputs, inputs, group, async);
    if (name == "all_to_all_single") return all_to_all_single(outputs[0], inputs[0], {}, {}, group, async);
    return barrier(group, async);
  }
};

/// Some collectives in turn; asynchronous ones are waited for as late as their tensors allow.
class CollectiveCaller final : public Caller {
 public:
  CollectiveCaller(const SoakPlan& plan, Lane lane, Random& common, Random& local)
      : lane_(std::move(lane)), make_(plan, lane_, local), async_(plan.calls == Calls::kAsynchronous) {
    const int64_t number = draw(common, async_ ? 2 : 1, 4);
    for (int64_t i = 0; i < number; ++i) {
      Collective next;
      // Half of them reductions in one tensor: only there do peers write into a user's memory.
      const bool reduction = draw(common, 0, 1) == 0;
      next.name = kCollectives[static_cast<size_t>(
          draw(common, 0, reduction ? kReductions - 1 : static_cast<int64_t>(kCollectives.size()) - 1))];
      next.numel = draw_numel(common, plan.size);
      next.dtype = kDtypes[static_cast<size_t>(draw(common, 0, kDtypes.size() - 1))];
      next.root = lane_.members[static_cast<size_t>(draw(common, 0, lane_.size() - 1))];
      if (draw(common, 0, 2) == 0) next.reduction = ReduceOp::MAX;
      next.make_tensors(lane_, make_);
      menu_.push_back(std::move(next));
    }
  }

  void step() override {
    const Collective& next = take_next();
    if (!async_) {
      next.call(lane_.group, false);
      return;
    }
    pending_.push_back(next.call(lane_.group, true));
    if (pending_.size() < menu_.size()) return;
    const Work first = pending_.front();
    pending_.pop_front();
    first->wait();
  }

  void mismatch(Failure failure) override {
    other_ = take_next();
    const bool barrier = other_.name == "barrier";
    if (failure == Failure::kOperation || barrier) {
      other_.name = barrier ? "all_reduce" : "barrier";
    } else if (failure == Failure::kShape) {
      other_.numel += lane_.size();
    } else {
      other_.dtype = other_.dtype == at::kFloat ? at::kInt : at::kFloat;
    }
    other_.inputs.clear();
    other_.outputs.clear();
    other_.make_tensors(lane_, make_);
    last_ = other_.word();
    other_.call(lane_.group, false);
  }

  std::vector<at::Tensor> tensors() const override {
    std::vector<at::Tensor> all;
    for (const Collective& each : menu_) {
      all.insert(all.end(), each.inputs.begin(), each.inputs.end());
      all.insert(all.end(), each.outputs.begin(), each.outputs.end());
    }
    all.insert(all.end(), other_.inputs.begin(), other_.inputs.end());
    all.insert(all.end(), other_.outputs.begin(), other_.outputs.end());
    for (at::Tensor& each : all) {
      if (each.is_sparse()) each = each._values();
    }
    return all;
  }

 private:
  const Collective& take_next() {
    const Collective& next = menu_[next_];
    next_ = (next_ + 1) % menu_.size();
    last_ = next.word();
    return next;
  }

  Lane lane_;
  TensorMaker make_;
  bool async_;
  std::vector<Collective> menu_;
  size_t next_ = 0;
  std::deque<Work> pending_;
  Collective other_;  // what did not fit
};

/// Messages between two ranks at a time, and a barrier after some of them, monitored or not.
class MessageCaller final : public Caller {
 public:
  MessageCaller(const SoakPlan& plan, Lane lane, Random& common, Random& local)
      : plan_(plan), lane_(std::move(lane)), common_(common), numel_(draw_numel(common, plan.size)) {
    TensorMaker make(plan, lane_, local);
    sent_ = make(numel_, at::kFloat);
    received_ = make(numel_, at::kFloat);
    // With another number of elements, or as many of another size.
    other_ = plan.failure == Failure::kShape ? make(numel_ + 1, at::kFloat) : make(numel_, at::kInt);
  }

  void step() override {
    if (++number_ % 8 == 0) {
      last_ = "monitored_barrier";
      return monitored_barrier(lane_.group);
    }
    if (number_ % 4 == 0) {
      last_ = "barrier";
      barrier(lane_.group);
      return;
    }
    const int64_t from = draw(common_, 0, lane_.size() - 1);
    const int64_t to = (from + draw(common_, 1, lane_.size() - 1)) % lane_.size();
    const bool any = draw(common_, 0, 3) == 0, async = draw(common_, 0, 1) == 0;
    // What may come from any rank has a tag of its own, so that no other receive can take it.
    message(lane_.members[static_cast<size_t>(from)], lane_.members[static_cast<size_t>(to)], sent_, any,
            async, any ? static_cast<int>(1000 + number_) : 0);
  }

  void mismatch(Failure) override {
    message(plan_.victim, plan_.partner, other_, false, false, kMismatchTag);
  }
  void meet_mismatch() override { message(plan_.victim, plan_.partner, other_, false, false, kMismatchTag); }
  std::vector<at::Tensor> tensors() const override { return {sent_, received_, other_}; }

 private:
  static constexpr int kMismatchTag = 7;

  void message(int from, int to, const at::Tensor& sent, bool any, bool async, int tag) {
    if (lane_.rank == from) {
      last_ = async ? "isend" : "send";
      if (async) {
        isend(sent, to, lane_.group, tag)->wait();
      } else {
        send(sent, to, lane_.group, tag);
      }
    } else if (lane_.rank == to) {
      const auto source = any ? std::optional<int>() : std::optional<int>(from);
      last_ = std::string(async ? "irecv" : "recv") + (any ? " from any rank" : "");
      if (async) {
        irecv(received_, source, lane_.group, tag)->wait();
      } else {
        recv(received_, source, lane_.group, tag);
      }
    }
  }

  const SoakPlan& plan_;
  Lane lane_;
  Random& common_;
  int64_t numel_;
  at::Tensor sent_, received_, other_;
  int64_t number_ = 0;
};

/// Objects.
class ObjectCaller final : public Caller {
 public:
  ObjectCaller(const SoakPlan& plan, Lane lane, Random& common)
      : lane_(std::move(lane)),
        common_(common),
        object_(std::string(static_cast<size_t>(draw_numel(common, plan.size)), 'x')),
        // All collective, where all are to meet a call that does not fit.
        kinds_(plan.mismatches() ? 4 : 6) {}

  void step() override {
    const int64_t kind = draw(common_, 0, kinds_ - 1);
    const int64_t at = draw(common_, 0, lane_.size() - 1);
    const int root = lane_.members[static_cast<size_t>(at)];
    std::vector<c10::IValue> objects(static_cast<size_t>(lane_.size()), object_);
    switch (kind) {
      case 0:
        last_ = "all_gather_object";
        return all_gather_object(objects, object_, lane_.group);
      case 1:
        last_ = "gather_object";
        return gather_object(object_, lane_.rank == root ? &objects : nullptr, root, lane_.group);
      case 2:
        last_ = "broadcast_object_list";
        return broadcast_object_list(objects, root, lane_.group);
      case 3: {
        last_ = "scatter_object_list";
        std::vector<c10::IValue> output(1);
        if (lane_.rank != root) objects.clear();
        return scatter_object_list(output, objects, root, lane_.group);
      }
      case 4: {
        const int to = lane_.members[static_cast<size_t>((at + 1) % lane_.size())];
        last_ = lane_.rank == root ? "send_object_list" : "recv_object_list";
        if (lane_.rank == root) send_object_list(objects, to, lane_.group);
        if (lane_.rank == to) recv_object_list(objects, root, lane_.group);
        return;
      }
      default:
        last_ = "barrier";
        barrier(lane_.group);
    }
  }

  void mismatch(Failure) override {
    last_ = "barrier";
    barrier(lane_.group);
  }
  std::vector<at::Tensor> tensors() const override { return {}; }

 private:
  Lane lane_;
  Random& common_;
  c10::IValue object_;
  int64_t kinds_;
};

/// New groups of all ranks or of some, which go at once.
class GroupCaller final : public Caller {
 public:
  GroupCaller(Lane lane, Random& common) : lane_(std::move(lane)), common_(common) {}

  void step() override {
    last_ = "new_group";
    std::vector<int> members;  // none are all
    for (const int rank : lane_.members) {
      if (draw(common_, 0, 2) > 0) members.push_back(rank);
    }
    destroy_process_group(new_group(members));
  }
  void mismatch(Failure) override { TORCH_CHECK(false, "no mismatch is drawn for new groups"); }
  void again(const ProcessGroup&) override { step(); }
  std::vector<at::Tensor> tensors() const override { return {}; }

 private:
  Lane lane_;
  Random& common_;
};

/// Training steps of DistributedDataParallel, with several buckets.
class DdpCaller final : public Caller {
 public:
  DdpCaller(const SoakPlan& plan, Lane lane)
      : lane_(std::move(lane)),
        net_(std::make_shared<Mlp>(plan.size == Size::kLarge ? std::vector<int64_t>{512, 1024, 1024, 10}
                                                             : std::vector<int64_t>{64, 128, 128, 10})),
        ddp_(net_, {.bucket_cap_mb = plan.size == Size::kLarge ? 1 : 0.02}),
        optimizer_(net_->parameters(), torch::optim::SGDOptions(0.01)),
        input_(torch::randn({8, net_->parameters()[0].size(1)})),
        target_(torch::randint(10, {8}, torch::kLong)) {}

  void step() override {
    last_ = "backward of DistributedDataParallel";
    optimizer_.zero_grad();
    torch::nn::functional::cross_entropy(ddp_(input_), target_).backward();
    optimizer_.step();
  }
  void mismatch(Failure) override {
    last_ = "all_gather_into_tensor";
    other_ = {at::ones({3}), at::zeros({3 * lane_.size()})};
    all_gather_into_tensor(other_[1], other_[0], lane_.group);
  }
  std::vector<at::Tensor> tensors() const override {
    std::vector<at::Tensor> all{input_};
    for (const auto& parameter : net_->parameters()) {
      all.push_back(parameter.detach());
      if (parameter.grad().defined()) all.push_back(parameter.grad());
    }
    all.insert(all.end(), other_.begin(), other_.end());
    return all;
  }

 private:
  Lane lane_;
  std::shared_ptr<Mlp> net_;
  DistributedDataParallel<Mlp> ddp_;
  torch::optim::SGD optimizer_;
  torch::Tensor input_, target_;
  std::vector<at::Tensor> other_;
};

}  // namespace lockstep::benchmarks
