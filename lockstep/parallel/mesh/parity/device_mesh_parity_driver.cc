// Makes the meshes that device_mesh_parity_test.py asks for and writes what this rank knows of them.
//
//     lockstep run --nproc-per-node N device_mesh_parity_driver JOBS OUTPUT
//
// JOBS: a pickled {name: {"mesh": ranks or [] for init_device_mesh, "shape": […], "names": […],
// "slices": [[names]…], "flatten": [[names, name]…]}}. OUTPUT: rank r writes {name: {mesh: [texts]}} to OUTPUT.r.

#include <torch/torch.h>

#include <lockstep/collectives/testing/pickle_file.h>
#include <lockstep/parallel/mesh/device_mesh.h>
#include <lockstep/testing/driver.h>

namespace device_mesh_parity_driver {
namespace {

using lockstep::DeviceMesh;
using lockstep::testing::at_key;
using Texts = c10::List<std::string>;

std::vector<std::string> strings(const c10::IValue& list) {
  std::vector<std::string> answer;
  for (const c10::IValue& value : list.toListRef()) answer.push_back(value.toStringRef());
  return answer;
}

std::vector<int64_t> integers(const c10::IValue& list) {
  std::vector<int64_t> answer;
  for (const c10::IValue& value : list.toListRef()) answer.push_back(value.toInt());
  return answer;
}

template <class Numbers>
std::string text_of(const Numbers& numbers) {
  std::string text;
  for (const auto number : numbers) text += std::to_string(number) + " ";
  return text;
}

/// What there is to know of a mesh, a line for each subject.
Texts facts(const DeviceMesh& mesh) {
  Texts texts;
  texts.push_back(mesh.describe());
  texts.push_back("shape " + text_of(mesh.shape()));
  const at::Tensor ranks = mesh.mesh().flatten();
  texts.push_back("ranks " + text_of(std::vector<int>(ranks.const_data_ptr<int>(),
                                                      ranks.const_data_ptr<int>() + ranks.numel())));
  const auto coordinate = mesh.get_coordinate();
  texts.push_back("coordinate " + (coordinate ? text_of(*coordinate) : "none"));
  if (!coordinate) return texts;
  for (int dim = 0; dim < mesh.ndim(); ++dim) {
    const auto group = mesh.get_group(dim);
    texts.push_back("group " + text_of(lockstep::get_process_group_ranks(group)) + "as " +
                    std::to_string(mesh.get_local_rank(dim)));
    texts.push_back(group == lockstep::default_group() ? "default" : group->getGroupDesc());
  }
  return texts;
}

c10::Dict<std::string, Texts> run(const c10::IValue& job) {
  const auto names = strings(at_key(job, "names"));
  const auto shape = integers(at_key(job, "shape"));
  const auto ranks = integers(at_key(job, "mesh"));
  const DeviceMesh mesh = ranks.empty() ? lockstep::init_device_mesh("cpu", shape, names)
                                        : DeviceMesh("cpu", torch::tensor(ranks).view(shape), names);
  c10::Dict<std::string, Texts> result;
  result.insert("root", facts(mesh));
  for (const c10::IValue& flatten : at_key(job, "flatten").toListRef()) {
    const auto parts = flatten.toListRef();
    const std::string name = parts[1].toStringRef();
    const auto flat = mesh.slice(strings(parts[0])).flatten(name);
    result.insert("flat " + name, facts(flat));
  }
  for (const c10::IValue& slice : at_key(job, "slices").toListRef()) {
    std::string key = "slice";
    for (const auto& name : strings(slice)) key += " " + name;
    try {
      result.insert(key, facts(mesh.slice(strings(slice))));
    } catch (const c10::IndexError&) {
      result.insert(key, Texts({"KeyError"}));
    } catch (const c10::Error&) {
      result.insert(key, Texts({"RuntimeError"}));
    }
  }
  return result;
}

}  // namespace

LOCKSTEP_DRIVER(device_mesh_parity_driver) {
  return lockstep::testing::run_jobs(argc, argv,
                                     [](const c10::IValue& job, int /*rank*/) { return run(job); });
}

}  // namespace device_mesh_parity_driver
