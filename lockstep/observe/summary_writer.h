#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <lockstep/observe/metrics_writer.h>

namespace at {
class Tensor;
}

namespace lockstep {

struct SummaryWriterOptions {
  /// Appended to the default log_dir; without effect where a log_dir is given.
  std::string comment = {};
  /// The training was resumed in the same log_dir at this step: TensorBoard hides what was logged for this
  /// step and later ones before. See also resume().
  std::optional<int64_t> purge_step = std::nullopt;
  /// So many events may wait for the thread; an add call beyond waits. (PyTorch has 10, which a handful of
  /// calls in one step would fill.)
  int64_t max_queue = 1000;
  /// Seconds between two times that what was written is forced to the disk, to be safe from a crash of the
  /// machine. Written, and seen by TensorBoard, it is within milliseconds.
  double flush_secs = 120;
  /// Appended to the names of the event files.
  std::string filename_suffix = {};
  /// Whether this process writes; rank 0 alone unless told.
  std::optional<bool> writes = std::nullopt;
};

/// Writes event files that TensorBoard shows, as torch.utils.tensorboard.SummaryWriter (torch/utils/
/// tensorboard/writer.py), with its names, arguments and messages.
///
///     SummaryWriter writer("runs/first");
///     writer.add_scalar("train/loss", loss, step);
///     writer.add_histogram("fc1/weight", net->fc1->weight, step);
///
/// `tag` names a series, and a slash in it makes a group. `global_step` is the place on the axis, and
/// `walltime` the time in seconds since 1970, now unless told.
///
/// A call serialises its event and hands it to a thread, which writes it within milliseconds: some hundred
/// nanoseconds to microseconds for a scalar; a histogram and an image are computed in the caller. A process
/// that exits, aborts, throws, or is ended by a signal waits until everything is written, a second at most;
/// one that is killed by SIGKILL leaves whole records, and loses only what the thread had not got to yet.
/// What the disk refuses is warned about once and counted, and the training goes on.
///
/// Files are made at the first event, by the rank that writes; other ranks do nothing. Thread-safe. Of
/// PyTorch's class it lacks add_figure, add_video, add_audio, add_graph, add_embedding, add_pr_curve,
/// add_custom_scalars, add_mesh and add_tensor.
class SummaryWriter : public MetricsWriter {
 public:
  /// `log_dir`: where the files go; runs/DATE_HOST unless told. Different runs below one folder are compared.
  /// Throws c10::ValueError when max_queue or flush_secs are not above zero.
  explicit SummaryWriter(std::filesystem::path log_dir = {}, SummaryWriterOptions options = {});
  /// close().
  ~SummaryWriter() override;
  SummaryWriter(const SummaryWriter&) = delete;
  SummaryWriter& operator=(const SummaryWriter&) = delete;

  /// `new_style`: as a tensor of one element, with `double_precision` of doubles; otherwise as a float.
  void add_scalar(const std::string& tag, double scalar_value,
                  std::optional<int64_t> global_step = std::nullopt,
                  std::optional<double> walltime = std::nullopt, bool new_style = false,
                  bool double_precision = false);
  /// Takes a tensor with one element, on any device; throws c10::ValueError for others.
  void add_scalar(const std::string& tag, const at::Tensor& scalar_value,
                  std::optional<int64_t> global_step = std::nullopt,
                  std::optional<double> walltime = std::nullopt, bool new_style = false,
                  bool double_precision = false);
  /// Several in one plot; each is a run of its own, in log_dir/MAIN_TAG_TAG.
  void add_scalars(const std::string& main_tag, const Metrics& tag_scalar_dict,
                   std::optional<int64_t> global_step = std::nullopt,
                   std::optional<double> walltime = std::nullopt);

  /// "tensorflow" (growing by 10 % from 1e-12 to 1e20, and the same below zero), how many of equal width, or
  /// their edges. Of NumPy's names, which PyTorch also takes, none.
  using Bins = std::variant<std::string, int64_t, std::vector<double>>;
  /// Takes a tensor of any shape, dtype and device. Values outside of the bins, NaN among them, are in no bin;
  /// with `max_bins`, neighbours are added up. Throws c10::ValueError for no values, for none inside of the
  /// bins, and for bins of another name.
  void add_histogram(const std::string& tag, const at::Tensor& values,
                     std::optional<int64_t> global_step = std::nullopt, const Bins& bins = "tensorflow",
                     std::optional<double> walltime = std::nullopt,
                     std::optional<int64_t> max_bins = std::nullopt);
  /// Takes what was counted elsewhere; `bucket_limits` are the bins' upper ends. Throws c10::ValueError when
  /// there are not as many as counts.
  void add_histogram_raw(const std::string& tag, double min, double max, double num, double sum,
                         double sum_squares, const std::vector<double>& bucket_limits,
                         const std::vector<double>& bucket_counts,
                         std::optional<int64_t> global_step = std::nullopt,
                         std::optional<double> walltime = std::nullopt);

  /// `img_tensor`: uint8 in [0, 255], or anything else in [0, 1], which is clipped; `dataformats` names its
  /// dimensions: CHW, HWC, HW, and so on. One channel is gray, three are RGB, four RGBA. Throws
  /// c10::ValueError when they don't fit.
  void add_image(const std::string& tag, const at::Tensor& img_tensor,
                 std::optional<int64_t> global_step = std::nullopt,
                 std::optional<double> walltime = std::nullopt, const std::string& dataformats = "CHW");
  /// A batch as a grid of rows of eight.
  void add_images(const std::string& tag, const at::Tensor& img_tensor,
                  std::optional<int64_t> global_step = std::nullopt,
                  std::optional<double> walltime = std::nullopt, const std::string& dataformats = "NCHW");

  /// Markdown.
  void add_text(const std::string& tag, const std::string& text_string,
                std::optional<int64_t> global_step = std::nullopt,
                std::optional<double> walltime = std::nullopt);

  /// What values a hyperparameter can have, by its name.
  using DiscreteDomains = std::map<std::string, std::vector<Hyperparameters::mapped_type>>;
  /// One finished experiment for TensorBoard's HPARAMS page: a run of its own in log_dir/RUN_NAME, or in
  /// log_dir/TIME. A bool stays a bool (PyTorch writes a number). Throws c10::ValueError when a domain is of
  /// an unknown name or of other types than its value.
  void add_hparams(const Hyperparameters& hparam_dict, const Metrics& metric_dict,
                   const DiscreteDomains& hparam_domain_discrete = {}, const std::string& run_name = "",
                   std::optional<int64_t> global_step = std::nullopt);

  /// add_scalar() for each.
  void log_metrics(const Metrics& metrics, int64_t step) override;
  /// For the HPARAMS page, which then shows this run's scalars beside them.
  void log_hyperparameters(const Hyperparameters& hyperparameters) override;
  /// purge_step, told later.
  void resume(int64_t next_step) override;
  /// Returns when all events are in their files and forced to the disk.
  void flush() override;
  /// Says how the run ended where it has hyperparameters, and closes.
  void finalize(std::string_view status) override;
  /// Writes what waits, and closes the files. A later add call opens a new one, as in PyTorch.
  void close();

  const std::filesystem::path& get_logdir() const;
  /// How many events the disk has refused.
  int64_t lost() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
