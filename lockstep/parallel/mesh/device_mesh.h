#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/collectives/process_group.h>

namespace lockstep {

namespace mesh::internal {
class Axis;
}  // namespace mesh::internal

/// The ranks of the job as an array, with a process group along each of its dimensions: for training that is
/// parallel in several ways at once.
///
///     auto mesh = lockstep::init_device_mesh("cpu", {2, 4}, {"dp", "tp"});
///     mesh.get_group("tp");            // this rank's group of 4
///     mesh["dp"].get_local_rank();     // 0 or 1
///     auto all = mesh.flatten();       // one dimension of 8, "dp_tp"
///
/// Copies and slices share their groups. A mesh ends no group: destroy_process_group() does. The constructor and flatten()
/// make groups, in the order of the dimensions: all ranks of the default group call them in the same order, also those that
/// are not in the mesh, as new_group(). Used by one thread at a time. torch/distributed/device_mesh.py; different are:
/// there must be a default group, axes have one group description each ("mesh_dp") but names of their own, and a rank that
/// is not in the mesh gets groups with which is_member() is false.
class DeviceMesh {
 public:
  /// `mesh`: integers, each a rank of the default group and no rank twice, in the shape of the mesh. `device_type`:
  /// "cpu", "cuda" and others without an index; unless it is "cpu" and unless this process has chosen a device,
  /// set_device() is called. Names are unique, one for each dimension, or none. Throws c10::Error (Python's RuntimeError),
  /// on all ranks alike, for what is otherwise; and what split_group() throws.
  DeviceMesh(std::string device_type, const at::Tensor& mesh, std::vector<std::string> mesh_dim_names = {});

  const std::string& device_type() const;
  const std::vector<std::string>& mesh_dim_names() const { return names_; }
  int ndim() const;
  std::vector<int64_t> shape() const;
  /// The size of all dimensions together, or of one; negative ones count from the end.
  int64_t size(std::optional<int> mesh_dim = {}) const;
  /// The ranks, as int32. Of a slice: those that share this rank's place in the dimensions that were left out; throws
  /// c10::Error on a rank that is not in the root mesh.
  at::Tensor mesh() const;

  /// The mesh of these dimensions, in the order of the mesh. On the mesh that all were made from it also takes the names
  /// of flattened ones. Throws c10::IndexError (KeyError) for other names and another order, c10::Error for dimensions
  /// that overlap and for a mesh without names.
  DeviceMesh operator[](const std::string& mesh_dim_name) const { return slice({mesh_dim_name}); }
  DeviceMesh operator[](std::initializer_list<std::string> mesh_dim_names) const {
    return slice(mesh_dim_names);
  }
  DeviceMesh slice(const std::vector<std::string>& mesh_dim_names) const;

  /// All dimensions as one, by the name given, or the names with "_" between. Made once for each name. Collective over the
  /// default group. Throws c10::ValueError when a dimension of the mesh has the name, or another flattened one.
  /// DeviceMesh._flatten().
  DeviceMesh flatten(const std::string& mesh_dim_name = {}) const;

  /// This rank's group along a dimension: by number, by name (also a flattened one's), or the only one. Throws
  /// c10::Error when there are several dimensions and none is named, c10::IndexError for one that is not there.
  ProcessGroup get_group() const;
  ProcessGroup get_group(int mesh_dim) const;
  ProcessGroup get_group(const std::string& mesh_dim) const;
  ProcessGroup get_group(const char* mesh_dim) const { return get_group(std::string(mesh_dim)); }
  std::vector<ProcessGroup> get_all_groups() const { return groups_; }

  /// This process's rank in the default group.
  int get_rank() const;
  /// This process's rank in a dimension's group; -1 if it is not in the mesh.
  int get_local_rank() const { return lockstep::get_rank(get_group()); }
  int get_local_rank(int mesh_dim) const { return lockstep::get_rank(get_group(mesh_dim)); }
  int get_local_rank(const std::string& mesh_dim) const { return lockstep::get_rank(get_group(mesh_dim)); }
  int get_local_rank(const char* mesh_dim) const { return lockstep::get_rank(get_group(mesh_dim)); }
  /// This rank's place in mesh(); none if it is not there.
  std::optional<std::vector<int64_t>> get_coordinate() const;

  /// Python's repr: "DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1))".
  std::string describe() const;
  /// Whether they have the same ranks at the same places, the same names and kind of device.
  bool operator==(const DeviceMesh& other) const;

 private:
  friend DeviceMesh init_device_mesh(const std::string& device_type, const std::vector<int64_t>& mesh_shape,
                                     std::vector<std::string> mesh_dim_names);
  struct Root;
  using Axes = std::vector<mesh::internal::Axis>;

  DeviceMesh(std::shared_ptr<Root> root, const Axes& axes, std::vector<std::string> names,
             std::vector<ProcessGroup> groups);

  bool is_root() const;
  size_t checked_dim(int mesh_dim) const;
  std::optional<size_t> find_name(const std::string& name) const;

  std::shared_ptr<Root> root_;  // of all meshes that were sliced or flattened from one
  std::shared_ptr<const Axes> axes_;
  std::vector<std::string> names_;  // empty, or one for each axis
  std::vector<ProcessGroup> groups_;
};

/// A mesh of this shape over the first ranks of the default group. The last dimension runs fastest, and over several hosts
/// it stays within them where it fits: ranks are counted host by host, whatever their launcher did, so that of meshes in
/// Python those are equal whose hosts have consecutive ranks, as torchrun's and `lockstep run`'s. Collective over the
/// default group. Throws c10::Error (Python's RuntimeError), on all ranks alike, for names that are not unique or not as
/// many as dimensions, a device type with an index, and more ranks than there are. torch.distributed.init_device_mesh.
DeviceMesh init_device_mesh(const std::string& device_type, const std::vector<int64_t>& mesh_shape,
                            std::vector<std::string> mesh_dim_names = {});

}  // namespace lockstep
