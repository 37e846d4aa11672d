#include <exception>
#include <optional>
#include <tuple>
#include <utility>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/host_name.h>
#include <lockstep/base/text/printable.h>
#include <lockstep/checkpoint/internal/checksum.h>
#include <lockstep/checkpoint/internal/file_io.h>
#include <lockstep/checkpoint/internal/save_job.h>
#include <lockstep/checkpoint/internal/tensor_file.h>
#include <lockstep/serialization/object_conversion.h>

namespace lockstep::checkpoint::internal {
namespace {

// Objects that travel between ranks.
using FailureObject = std::tuple<int64_t, std::string>;
using OfferObject = std::tuple<FailureObject, std::string, std::vector<TensorOffer>, bool>;
using PlanObject = std::tuple<FailureObject, std::string, std::vector<FileTask>, int64_t>;
using FileObject = std::tuple<std::string, int64_t, std::string>;
using PartObject = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::string>;
using TensorObject = std::tuple<std::string, std::string, std::string, std::string, std::vector<int64_t>,
                                int64_t, int64_t, std::string, std::optional<PartObject>>;
using ReportObject = std::tuple<FailureObject, std::vector<FileObject>, std::vector<TensorObject>>;

FailureObject to_tuple(const Failure& failure) {
  return {failure.kind, failure.text};
}

Failure from_tuple(const FailureObject& object) {
  return {static_cast<Failure::Kind>(std::get<0>(object)), std::get<1>(object)};
}

std::optional<PartObject> to_part_object(const std::optional<serialization::TensorPart>& part) {
  if (!part) return {};
  return PartObject{part->global_shape, part->offsets, part->mesh_dim};
}

std::optional<serialization::TensorPart> from_part_object(const std::optional<PartObject>& object) {
  if (!object) return {};
  const auto& [global_shape, offsets, mesh_dim] = *object;
  return serialization::TensorPart{.global_shape = global_shape, .offsets = offsets, .mesh_dim = mesh_dim};
}

/// "rank00003" names what is a rank's own.
void check_part_name(const std::string& part) {
  const bool reserved = part.size() >= 9 && part.starts_with("rank") &&
                        part.find_first_not_of("0123456789", 4) == std::string::npos;
  TORCH_CHECK_VALUE(!reserved, "a part of the state can't be called '", part,
                    "', for so the ranks' own states are called");
}

/// Of what several ranks have under one name the lowest rank's is saved: of their parts of a tensor one would be left.
void check_is_whole(const serialization::StateTensor& tensor) {
  if (!tensor.part_of) return;
  const auto& part = *tensor.part_of;
  TORCH_CHECK_VALUE(
      serialization::is_whole(part, tensor.tensor.sizes().vec()), "state: tensor '", printable(tensor.name),
      "' of ", printable(tensor.part), " is a part of sizes ", tensor.tensor.sizes(), ", from ",
      at::IntArrayRef(part.offsets), " on, of a tensor of ", at::IntArrayRef(part.global_shape),
      ", of which other ranks have other parts under the same name, and one rank's alone would be saved; "
      "pass sharded states as rank_state, or save full ones (full_state_dict(), full_optim_state_dict())");
}

}  // namespace

Failure Failure::of_current_exception(const MemberRanks& ranks) {
  Failure failure;
  try {
    throw;
  } catch (const c10::ValueError& error) {
    failure = {kValue, error.what_without_backtrace()};
  } catch (const CheckpointIoError& error) {
    failure = {kIo, error.what_without_backtrace()};
  } catch (const std::exception& error) {
    failure = {kFile, text_of(error)};
  }
  if (ranks.size() > 1) failure.text = "rank " + std::to_string(ranks.rank()) + ": " + failure.text;
  return failure;
}

void Failure::raise() const {
  TORCH_CHECK_VALUE(kind != kValue, text);
  if (kind == kIo) throw CheckpointIoError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
  LOCKSTEP_CHECK_FILE(kind == kNone, text);
}

SaveJob::SaveJob(const std::filesystem::path& directory, const StateDict& state, const StateDict& rank_state,
                 const CheckpointInfo& info, const SaveOptions& options, bool managed,
                 const MemberRanks& ranks)
    : info_(info), options_(options), managed_(managed) {
  info_.directory = std::filesystem::absolute(directory).lexically_normal();
  if (!info_.directory.has_filename()) info_.directory = info_.directory.parent_path();
  serialization::EncodedState shared;
  serialization::EncodedState own;
  std::vector<TensorOffer> offers;
  const Failure mine = Failure::of(ranks, [&] {
    for (const auto& [part, value] : state) check_part_name(part);
    shared = serialization::encode_state(state, "state");
    for (const auto& tensor : shared.tensors) check_is_whole(tensor);
    if (!rank_state.empty()) {
      own_name_ = rank_name(ranks.rank());
      own = serialization::encode_state(rank_state, "rank_state", own_name_);
      own_json_ = std::move(own.json);
      std::move(own.tensors.begin(), own.tensors.end(), std::back_inserter(shared.tensors));
    }
    for (const auto& each : shared.tensors) {
      offers.emplace_back(each.part, each.name, static_cast<int64_t>(each.tensor.nbytes()));
    }
  });
  const auto gathered =
      ranks.gather(to_object(OfferObject{to_tuple(mine), shared.json, offers, !own_name_.empty()}));

  std::vector<c10::IValue> plans;
  if (ranks.leads()) {
    Failure failure;
    std::vector<std::vector<FileTask>> tasks(gathered.size());
    const Failure here = Failure::of(ranks, [&] {
      std::vector<std::string> states;
      std::vector<std::vector<TensorOffer>> all;
      for (size_t rank = 0; rank < gathered.size(); ++rank) {
        auto [theirs, json, offered, has_own] = from_object<OfferObject>(gathered[rank]);
        if (failure.kind == Failure::kNone) failure = from_tuple(theirs);
        states.push_back(std::move(json));
        all.push_back(std::move(offered));
        if (has_own) ranks_with_own_.push_back(ranks.size() > 1 ? static_cast<int64_t>(rank) : ranks.rank());
      }
      if (failure.kind != Failure::kNone) return;
      failpoint::here("checkpoint.plan");
      state_json_ = serialization::merge_states(states);
      tasks = assign_files(all, options.sharded);
      std::error_code error;
      LOCKSTEP_CHECK_FILE(options.overwrite || !std::filesystem::exists(info_.directory, error),
                          info_.directory.string(),
                          " exists already; take another name, or say overwrite to replace it");
      temporary_ = std::make_unique<TemporaryDirectory>(info_.directory);
      failpoint::here("checkpoint.directory_made");
    });
    if (failure.kind == Failure::kNone) failure = here;
    const auto now = std::chrono::duration_cast<std::chrono::microseconds>(
                         std::chrono::system_clock::now().time_since_epoch())
                         .count();
    for (auto& task : tasks) {
      plans.push_back(to_object(PlanObject{to_tuple(failure), temporary_ ? temporary_->path().string() : "",
                                           std::move(task), now}));
    }
  }
  auto [failure, path, tasks, now] = from_object<PlanObject>(ranks.scatter(plans));
  from_tuple(failure).raise();
  path_ = path;
  info_.world_size = ranks.group_size();
  info_.saved_at = std::chrono::system_clock::time_point(std::chrono::microseconds(now));
  info_.directory = path_.parent_path() / info_.directory.filename();
  for (const auto& [name, part, indices] : tasks) {
    File file{name, part, {}};
    for (const int64_t i : indices) file.tensors.push_back(shared.tensors.at(static_cast<size_t>(i)));
    files_.push_back(std::move(file));
  }
}

void SaveJob::stage(Pages& memory, const MemberRanks& ranks, bool later) {
  staging_ = Failure::of(ranks, [&] {
    std::vector<serialization::StateTensor*> tensors;
    for (File& file : files_) {
      for (serialization::StateTensor& tensor : file.tensors) tensors.push_back(&tensor);
    }
    snapshot_.copy(tensors, memory, later);
  });
}

void SaveJob::copy_rest(const MemberRanks& ranks) {
  if (staging_.kind == Failure::kNone) staging_ = Failure::of(ranks, [&] { snapshot_.copy_rest(); });
}

void SaveJob::write_text(const std::string& name, const std::string& text, Results& results) const {
  OutputFile file(path_ / name);
  file.write(text.data(), text.size());
  file.finish(options_.fsync);
  results.files.push_back({name, static_cast<int64_t>(text.size()), checksum_of(text)});
}

SaveJob::Results SaveJob::write_files(const std::atomic<bool>* cancelled) const {
  Results results;
  for (const File& file : files_) {
    std::vector<NamedTensor> tensors;
    for (const serialization::StateTensor& each : file.tensors) tensors.push_back({each.name, each.tensor});
    // Readers of Hugging Face's want the metadata's "format".
    const WrittenFile written =
        write_tensor_file(path_ / file.name, tensors, {{"format", "pt"}},
                          {.sync = options_.fsync, .checksums = true, .cancelled = cancelled});
    results.files.push_back({file.name, written.bytes, written.checksum});
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& tensor = tensors[i].tensor;
      results.tensors.push_back({file.part, tensors[i].name, file.name,
                                 serialization::safetensors_dtype(tensor.scalar_type()).value(),
                                 tensor.sizes().vec(), written.offsets[i],
                                 static_cast<int64_t>(tensor.nbytes()), written.checksums[i],
                                 file.tensors[i].part_of});
    }
  }
  if (!own_name_.empty()) write_text(own_name_ + ".json", own_json_, results);
  if (temporary_) write_text(kStateName, state_json_, results);
  failpoint::here("checkpoint.files_written");
  return results;
}

CheckpointInfo SaveJob::write(const MemberRanks& ranks, const std::atomic<bool>* cancelled) {
  Results results;
  Failure mine = staging_;
  if (mine.kind == Failure::kNone) mine = Failure::of(ranks, [&] { results = write_files(cancelled); });
  std::error_code unknown;
  if (mine.kind == Failure::kFile && !std::filesystem::exists(path_, unknown)) {
    mine.text += "; rank 0 has made this folder, but it is not there on host '" + host_name() +
                 "': ranks that write, and those that load, must share a file system";
  }
  std::vector<FileObject> files;
  for (const FileRecord& file : results.files) files.emplace_back(file.name, file.bytes, file.checksum);
  std::vector<TensorObject> tensors;
  for (const TensorRecord& each : results.tensors) {
    tensors.emplace_back(each.part, each.name, each.file, each.dtype, each.shape, each.offset, each.bytes,
                         each.checksum, to_part_object(each.part_of));
  }
  const auto reports = ranks.gather(to_object(ReportObject{to_tuple(mine), files, tensors}));
  files_.clear();
  Failure failure;
  if (ranks.leads()) {
    for (const c10::IValue& report : reports) {
      if (failure.kind == Failure::kNone)
        failure = from_tuple(std::get<0>(from_object<ReportObject>(report)));
    }
    if (failure.kind == Failure::kNone) failure = Failure::of(ranks, [&] { finish(reports); });
    temporary_.reset();  // and with it, when something went wrong, the directory
  }
  from_tuple(from_object<FailureObject>(ranks.broadcast(to_object(to_tuple(failure))))).raise();
  return info_;
}

void SaveJob::finish(const std::vector<c10::IValue>& reports) {
  Manifest manifest;
  manifest.info = info_;
  manifest.managed = managed_;
  manifest.ranks = ranks_with_own_;
  for (const c10::IValue& report : reports) {
    const auto [failure, files, tensors] = from_object<ReportObject>(report);
    for (const auto& [name, bytes, checksum] : files) manifest.files.push_back({name, bytes, checksum});
    for (const auto& [part, name, file, dtype, shape, offset, bytes, checksum, part_of] : tensors) {
      manifest.tensors.push_back(
          {part, name, file, dtype, shape, offset, bytes, checksum, from_part_object(part_of)});
    }
  }
  failpoint::here("checkpoint.before_manifest");
  const std::string text = to_text(manifest);
  TORCH_CHECK_VALUE(static_cast<int64_t>(text.size()) <= kMaxManifest, "the checkpoint has ",
                    manifest.tensors.size(), " tensors, whose manifest would have ", text.size(),
                    " bytes, more than the ", kMaxManifest, " that are read; save fewer, larger ones");
  OutputFile file(path_ / kManifestName);
  file.write(text.data(), text.size() / 2);
  failpoint::here("checkpoint.within_manifest");
  file.write(text.data() + text.size() / 2, text.size() - text.size() / 2);
  file.finish(options_.fsync);
  if (fence_) fence_();
  temporary_->publish(options_.overwrite, options_.fsync);
}

}  // namespace lockstep::checkpoint::internal
