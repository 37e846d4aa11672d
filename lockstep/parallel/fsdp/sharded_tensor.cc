#include <lockstep/parallel/fsdp/sharded_tensor.h>
#include <lockstep/serialization/state_dict.h>

namespace lockstep {

c10::IValue ObjectConversion<fsdp::ShardedTensor>::to(const fsdp::ShardedTensor& tensor) {
  return to_object(StateDict{{"local", tensor.local},
                             {"row", tensor.row},
                             {"global_sizes", to_object(tensor.global_sizes)},
                             {"mesh_dim", std::string("shard")}});
}

fsdp::ShardedTensor ObjectConversion<fsdp::ShardedTensor>::from(const c10::IValue& object) {
  const auto state = from_object<StateDict>(object);
  constexpr const char* kOwner = "FullyShardedDataParallel";
  return {.local = state_value<at::Tensor>(state, "local", kOwner),
          .row = state_value<int64_t>(state, "row", kOwner),
          .global_sizes = state_value<std::vector<int64_t>>(state, "global_sizes", kOwner)};
}

}  // namespace lockstep
