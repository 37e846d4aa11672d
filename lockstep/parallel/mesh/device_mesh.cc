#include <algorithm>
#include <cctype>
#include <set>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include <lockstep/base/log.h>
#include <lockstep/device/device.h>
#include <lockstep/parallel/mesh/device_mesh.h>
#include <lockstep/parallel/mesh/internal/mesh_layout.h>

namespace lockstep {

using mesh::internal::Axis;
using mesh::internal::joined;
using mesh::internal::origins;

/// What a mesh and all that is sliced and flattened from it have in common.
struct DeviceMesh::Root {
  /// A dimension that flatten() made.
  struct Flattened {
    std::string name;
    Axis axis;
    ProcessGroup group;
  };

  std::string device_type;
  std::vector<int> ranks;  // the whole mesh's, to which the axes' indices lead
  Axes axes;
  std::vector<std::string> names;
  int rank = 0;  // this process's, in the default group
  std::vector<Flattened> flattened = {};

  int64_t total() const { return static_cast<int64_t>(ranks.size()); }
  const Flattened* find_flattened(const std::string& name) const {
    const auto found = std::ranges::find(flattened, name, &Flattened::name);
    return found == flattened.end() ? nullptr : &*found;
  }
};

namespace {

/// "('dp', 'tp')", as Python prints it.
std::string tuple_of(const std::vector<std::string>& names) {
  std::string text = "(";
  for (size_t i = 0; i < names.size(); ++i) text += (i == 0 ? "'" : ", '") + names[i] + '\'';
  return text + (names.size() == 1 ? ",)" : ")");
}

std::string tuple_of(const std::vector<int64_t>& numbers) {
  return "(" + c10::Join(", ", numbers) + (numbers.size() == 1 ? ",)" : ")");
}

std::string list_of(const std::vector<std::string>& names) {
  const std::string tuple = tuple_of(names);
  return "[" + tuple.substr(1, tuple.size() - (names.size() == 1 ? 3 : 2)) + "]";
}

void check_names(const std::vector<std::string>& names, size_t dimensions) {
  TORCH_CHECK(std::set<std::string>(names.begin(), names.end()).size() == names.size(),
              "Each mesh_dim_name must be unique. Found repeated mesh_dim_name in mesh_dim_names ",
              tuple_of(names));
  TORCH_CHECK(names.empty() || names.size() == dimensions,
              "mesh_shape and mesh_dim_names should have same length! Found len(mesh_dim_names): ",
              names.size(), " and len(mesh_shape):", dimensions, ".");
}

void check_device_type(const std::string& device_type) {
  TORCH_CHECK(!device_type.empty() &&
                  std::ranges::all_of(device_type, [](unsigned char c) { return std::isalpha(c) != 0; }),
              "Device type with index is not supported but got ", device_type,
              ". If you maintained a 'torch.device' object, it's recommended to pass in its type.");
}

/// The ranks along one dimension, a list for each place in the others.
std::vector<std::vector<int>> lists_of_ranks(const std::vector<int>& ranks, const Axis& axis) {
  const auto indices = axis.indices();
  std::vector<std::vector<int>> lists;
  for (const int64_t origin : origins(axis, static_cast<int64_t>(ranks.size()))) {
    auto& list = lists.emplace_back();
    for (const int64_t index : indices) list.push_back(ranks[static_cast<size_t>(origin + index)]);
  }
  return lists;
}

/// This rank's group along the dimension. The one place in which groups of dimensions are made; collective over the
/// default group. One agreement of all ranks for all groups of a dimension.
ProcessGroup group_along(const std::vector<int>& ranks, const Axis& axis, const std::string& name) {
  if (axis.size() == get_world_size()) return default_group();
  return split_group(default_group(), lists_of_ranks(ranks, axis), {}, "mesh_" + name);
}

/// Which dimensions stay within hosts, for the log.
std::string describe_hosts(const std::vector<int>& ranks, const std::vector<Axis>& axes,
                           const std::vector<std::string>& names) {
  const Topology topology = get_topology();
  std::string text;
  for (size_t i = 0; i < axes.size(); ++i) {
    const auto lists = lists_of_ranks(ranks, axes[i]);
    const bool within = std::ranges::all_of(lists, [&](const std::vector<int>& list) {
      return std::ranges::all_of(list, [&](int rank) {
        return topology.host_of[static_cast<size_t>(rank)] == topology.host_of[static_cast<size_t>(list[0])];
      });
    });
    text += (i == 0 ? "" : ", ") + (names.empty() ? "dimension " + std::to_string(i) : names[i]) +
            (within ? " within hosts" : " between hosts");
  }
  return text;
}

at::Tensor as_tensor(const std::vector<int>& ranks, at::IntArrayRef sizes) {
  at::Tensor tensor = at::empty(sizes, at::kInt);
  std::copy(ranks.begin(), ranks.end(), tensor.mutable_data_ptr<int>());
  return tensor;
}

}  // namespace

DeviceMesh::DeviceMesh(std::string device_type, const at::Tensor& mesh,
                       std::vector<std::string> mesh_dim_names)
    : names_(std::move(mesh_dim_names)) {
  check_device_type(device_type);
  TORCH_CHECK(mesh.defined() && at::isIntegralType(mesh.scalar_type(), /*includeBool=*/false),
              "the mesh must be a tensor of integers, the ranks");
  check_names(names_, static_cast<size_t>(mesh.dim()));
  const int world_size = get_world_size();
  TORCH_CHECK(mesh.numel() > 0, "the mesh of shape ", mesh.sizes(), " has no ranks");
  TORCH_CHECK(mesh.numel() <= world_size, "Mesh should not be bigger than default world size ", world_size,
              ", but found ", mesh.numel(), " ranks!");
  const at::Tensor flat = mesh.detach().to(at::kCPU, at::kLong).contiguous();
  std::vector<int> ranks;
  for (int64_t i = 0; i < flat.numel(); ++i) {
    const int64_t rank = flat.const_data_ptr<int64_t>()[i];
    TORCH_CHECK(0 <= rank && rank < world_size, "the mesh has rank ", rank,
                "; the default group has ranks 0 to ", world_size - 1);
    TORCH_CHECK(std::ranges::count(ranks, rank) == 0, "rank ", rank, " stands more than once in the mesh");
    ranks.push_back(static_cast<int>(rank));
  }
  if (device_type != "cpu" && !chosen_device()) set_device();
  auto axes = std::make_shared<const Axes>(mesh::internal::row_major(mesh.sizes().vec()));
  axes_ = axes;
  root_ = std::make_shared<Root>(Root{.device_type = std::move(device_type),
                                      .ranks = std::move(ranks),
                                      .axes = *axes,
                                      .names = names_,
                                      .rank = lockstep::get_rank()});
  for (size_t i = 0; i < axes->size(); ++i) {
    groups_.push_back(
        group_along(root_->ranks, (*axes)[i], names_.empty() ? "dim_" + std::to_string(i) : names_[i]));
  }
  LOCKSTEP_LOG(kInfo) << "made " << describe() << ": " << describe_hosts(root_->ranks, *axes_, names_);
}

DeviceMesh::DeviceMesh(std::shared_ptr<Root> root, const Axes& axes, std::vector<std::string> names,
                       std::vector<ProcessGroup> groups)
    : root_(std::move(root)),
      axes_(std::make_shared<const Axes>(axes)),
      names_(std::move(names)),
      groups_(std::move(groups)) {}

const std::string& DeviceMesh::device_type() const {
  return root_->device_type;
}

int DeviceMesh::get_rank() const {
  return root_->rank;
}

int DeviceMesh::ndim() const {
  return static_cast<int>(axes_->size());
}

bool DeviceMesh::is_root() const {
  return *axes_ == root_->axes && names_ == root_->names;
}

size_t DeviceMesh::checked_dim(int mesh_dim) const {
  TORCH_CHECK_INDEX(-ndim() <= mesh_dim && mesh_dim < ndim(), "mesh_dim ", mesh_dim,
                    " is out of range; the mesh has ", ndim(), " dimensions");
  return static_cast<size_t>(mesh_dim < 0 ? mesh_dim + ndim() : mesh_dim);
}

std::optional<size_t> DeviceMesh::find_name(const std::string& name) const {
  const auto found = std::ranges::find(names_, name);
  if (found == names_.end()) return std::nullopt;
  return static_cast<size_t>(found - names_.begin());
}

std::vector<int64_t> DeviceMesh::shape() const {
  std::vector<int64_t> sizes;
  for (const Axis& axis : *axes_) sizes.push_back(axis.size());
  return sizes;
}

int64_t DeviceMesh::size(std::optional<int> mesh_dim) const {
  if (mesh_dim) return (*axes_)[checked_dim(*mesh_dim)].size();
  return joined(*axes_).size();
}

at::Tensor DeviceMesh::mesh() const {
  const auto lists = lists_of_ranks(root_->ranks, joined(*axes_));
  if (lists.size() == 1) return as_tensor(lists[0], shape());
  for (const auto& list : lists) {
    if (std::ranges::count(list, root_->rank) > 0) return as_tensor(list, shape());
  }
  TORCH_CHECK(
      false,
      "In order to get the mesh Tensor of a DeviceMesh it needs to either have all its original dimensions "
      "(e.g., no slicing) or it needs to contain the local rank");
}

std::optional<std::vector<int64_t>> DeviceMesh::get_coordinate() const {
  if (std::ranges::find(root_->ranks, root_->rank) == root_->ranks.end()) return std::nullopt;
  const at::Tensor ranks = mesh();
  const int* const begin = ranks.const_data_ptr<int>();
  int64_t place = std::find(begin, begin + ranks.numel(), root_->rank) - begin;
  if (place == ranks.numel()) return std::nullopt;
  std::vector<int64_t> coordinate = shape();
  for (auto size = coordinate.rbegin(); size != coordinate.rend(); ++size) {
    *size = std::exchange(place, place / *size) % *size;
  }
  return coordinate;
}

DeviceMesh DeviceMesh::slice(const std::vector<std::string>& mesh_dim_names) const {
  TORCH_CHECK(!names_.empty(), "Cannot slice a DeviceMesh without mesh_dim_names!");
  if (mesh_dim_names == names_) return *this;
  Axes axes;
  std::vector<ProcessGroup> groups;
  for (const std::string& name : mesh_dim_names) {
    if (const auto dim = find_name(name)) {
      axes.push_back((*axes_)[*dim]);
      groups.push_back(groups_[*dim]);
      continue;
    }
    const auto* flattened = is_root() ? root_->find_flattened(name) : nullptr;
    if (flattened == nullptr) {
      std::vector<std::string> valid = names_;
      if (is_root()) {
        for (const auto& other : root_->flattened) valid.push_back(other.name);
      }
      TORCH_CHECK_INDEX(false, "Invalid mesh_dim_names ", tuple_of(mesh_dim_names),
                        " specified. Valid mesh_dim_names are ", list_of(valid), ".");
    }
    axes.push_back(flattened->axis);
    groups.push_back(flattened->group);
  }
  const Axis all = joined(axes);
  TORCH_CHECK_INDEX(mesh::internal::has_descending_strides(all), "Invalid mesh_dim_names ",
                    tuple_of(mesh_dim_names), " specified. Mesh dim indices should be in ascending order.");
  TORCH_CHECK(mesh::internal::is_injective(all), "Slicing overlapping dim_names ", tuple_of(mesh_dim_names),
              " is not allowed.");
  return DeviceMesh(root_, axes, mesh_dim_names, std::move(groups));
}

DeviceMesh DeviceMesh::flatten(const std::string& mesh_dim_name) const {
  TORCH_CHECK(!names_.empty(), "Cannot flatten a DeviceMesh without mesh_dim_names!");
  std::string name = mesh_dim_name;
  if (name.empty()) {
    for (const std::string& part : names_) name += (name.empty() ? "" : "_") + part;
  }
  if (ndim() == 1 && name == names_[0]) return *this;
  TORCH_CHECK_VALUE(std::ranges::find(root_->names, name) == root_->names.end(), name,
                    " already exists for submesh of the ", describe(),
                    ". The mesh_dim_names of submesh and flattened mesh are ", tuple_of(root_->names),
                    ". Please specify another valid mesh_dim_name.");
  const Axis axis = joined(*axes_);
  const auto* known = root_->find_flattened(name);
  TORCH_CHECK_VALUE(known == nullptr || known->axis == axis, "Flatten mesh with mesh_dim_name ", name,
                    " has been created before, Please specify another valid mesh_dim_name.");
  if (known == nullptr) {
    root_->flattened.push_back({.name = name, .axis = axis, .group = group_along(root_->ranks, axis, name)});
    known = &root_->flattened.back();
  }
  return DeviceMesh(root_, {axis}, {name}, {known->group});
}

ProcessGroup DeviceMesh::get_group() const {
  TORCH_CHECK(
      ndim() == 1, "Found the DeviceMesh have ", ndim(),
      " dimensions. Optional argument `mesh_dim` needs to be specified when device_mesh.ndim > 1. If you "
      "want to "
      "get the list of all the ProcessGroups in the DeviceMesh, please use `get_all_groups()` instead.");
  return groups_[0];
}

ProcessGroup DeviceMesh::get_group(int mesh_dim) const {
  return groups_[checked_dim(mesh_dim)];
}

ProcessGroup DeviceMesh::get_group(const std::string& mesh_dim) const {
  if (const auto* flattened = root_->find_flattened(mesh_dim)) return flattened->group;
  TORCH_CHECK_INDEX(!names_.empty(), "No `mesh_dim_names` found.");
  const auto dim = find_name(mesh_dim);
  TORCH_CHECK_INDEX(dim.has_value(), "Mesh dimension '", mesh_dim,
                    "' does not exist. Available mesh dimensions are: mesh_dim_names=", tuple_of(names_));
  return groups_[*dim];
}

std::string DeviceMesh::describe() const {
  const auto sizes = shape();
  std::string text = "DeviceMesh(";
  if (names_.empty()) {
    text += tuple_of(sizes);
  } else {
    for (size_t i = 0; i < sizes.size(); ++i)
      text += (i == 0 ? "(" : ", ") + names_[i] + "=" + std::to_string(sizes[i]);
    text += ")";
  }
  text += ", '" + root_->device_type + "', stride=(";
  for (size_t i = 0; i < axes_->size(); ++i) {
    std::vector<int64_t> strides;
    for (const auto& loop : (*axes_)[i].loops()) strides.push_back(loop.stride);
    text += (i == 0 ? "" : ", ") + (strides.size() == 1 ? std::to_string(strides[0]) : tuple_of(strides));
  }
  return text + (axes_->size() == 1 ? ",))" : "))");
}

bool DeviceMesh::operator==(const DeviceMesh& other) const {
  return root_->ranks == other.root_->ranks && *axes_ == *other.axes_ && names_ == other.names_ &&
         root_->device_type == other.root_->device_type;
}

DeviceMesh init_device_mesh(const std::string& device_type, const std::vector<int64_t>& mesh_shape,
                            std::vector<std::string> mesh_dim_names) {
  check_names(mesh_dim_names, mesh_shape.size());
  check_device_type(device_type);
  std::vector<int> ranks;  // all, those of the first host first, and so on
  for (const auto& host : get_topology().ranks_by_host()) ranks.insert(ranks.end(), host.begin(), host.end());
  int64_t total = 1;
  for (const int64_t size : mesh_shape) {
    TORCH_CHECK(size > 0, "the mesh of shape ", tuple_of(mesh_shape), " has no ranks");
    TORCH_CHECK(size <= static_cast<int64_t>(ranks.size()),
                "Mesh should not be bigger than default world size ", ranks.size(), ", but found ", size,
                " ranks in one dimension!");
    total *= size;  // of two numbers of ranks at most
    TORCH_CHECK(total <= static_cast<int64_t>(ranks.size()),
                "Mesh should not be bigger than default world size ", ranks.size(), ", but found ", total,
                " ranks!");
  }
  ranks.resize(static_cast<size_t>(total));
  return DeviceMesh(device_type, as_tensor(ranks, mesh_shape), std::move(mesh_dim_names));
}

}  // namespace lockstep
