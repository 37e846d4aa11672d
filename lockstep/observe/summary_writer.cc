#include <algorithm>
#include <array>
#include <atomic>
#include <ctime>
#include <mutex>
#include <unistd.h>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <lockstep/base/files/append_file.h>
#include <lockstep/base/host_name.h>
#include <lockstep/base/process/fork_guard.h>
#include <lockstep/base/text/formatted.h>
#include <lockstep/observe/internal/event_queue.h>
#include <lockstep/observe/internal/image_layout.h>
#include <lockstep/observe/internal/make_histogram.h>
#include <lockstep/observe/internal/png.h>
#include <lockstep/observe/internal/summary_messages.h>
#include <lockstep/observe/internal/wall_time.h>
#include <lockstep/observe/summary_writer.h>
#include <lockstep/observe/writing_rank.h>

namespace lockstep {
namespace {

using observe::internal::EventTime;

std::string host_or_localhost() {
  const std::string name = host_name();
  return name.empty() ? "localhost" : name;
}

/// runs/Nov22_05-03-42_HOST
std::filesystem::path default_log_dir(const std::string& comment) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  std::array<char, 64> date{};
  std::strftime(date.data(), date.size(), "%b%d_%H-%M-%S", &local);
  return std::filesystem::path("runs") / (std::string(date.data()) + "_" + host_or_localhost() + comment);
}

/// tensorboard/summary/writer/event_file_writer.py; the last number sets files of one process apart.
std::string event_file_name(const std::string& suffix) {
  static std::atomic<int64_t> next{0};
  return formatted("events.out.tfevents.%010lld.", static_cast<long long>(std::time(nullptr))) +
         host_or_localhost() + "." + std::to_string(::getpid()) + "." + std::to_string(next++) + suffix;
}

void check_domains(const Hyperparameters& values, const SummaryWriter::DiscreteDomains& domains) {
  for (const auto& [name, possible] : domains) {
    const auto value = values.find(name);
    const bool same_types =
        value != values.end() && std::all_of(possible.begin(), possible.end(), [&](const auto& one) {
          return one.index() == value->second.index();
        });
    TORCH_CHECK_VALUE(same_types, "parameter: hparam_domain_discrete[", name,
                      "] should be a list of same type as hparam_dict[", name, "].");
  }
}

}  // namespace

/// The files of a writer by folder, and their thread. Both are made at the first event after the start or
/// close().
class SummaryWriter::Impl {
 public:
  Impl(std::filesystem::path log_dir, SummaryWriterOptions options)
      : log_dir_(log_dir.empty() ? default_log_dir(options.comment) : std::move(log_dir)),
        options_(std::move(options)),
        rank_(options_.writes),
        purge_step_(options_.purge_step) {
    TORCH_CHECK_VALUE(options_.max_queue > 0, "SummaryWriter: max_queue is ", options_.max_queue,
                      "; it is a number of events, at least 1");
    TORCH_CHECK_VALUE(options_.flush_secs > 0, "SummaryWriter: flush_secs is ", options_.flush_secs,
                      "; it is a time above zero");
  }

  bool in_forked_child() const { return fork_guard_.in_forked_child(); }
  bool writes() { return !in_forked_child() && rank_.here(); }
  const std::filesystem::path& log_dir() const { return log_dir_; }

  /// Into a file in `folder`, a name relative to log_dir.
  void add(const std::string& folder, std::optional<int64_t> step, std::optional<double> wall_time,
           const std::string& summary) {
    std::string event = observe::internal::summary_event(
        {wall_time ? *wall_time : observe::internal::wall_time(), step}, summary);
    const std::lock_guard lock(mutex_);
    AppendFile& file = this->file(folder);
    queue_->add(file, std::move(event));
  }

  void resume(int64_t next_step) {
    const std::lock_guard lock(mutex_);
    purge_step_ = next_step;
    purge(file(""));
  }

  void flush() {
    if (in_forked_child()) return;
    const std::lock_guard lock(mutex_);
    if (queue_) queue_->flush();
  }

  void close() {
    if (in_forked_child()) return;
    const std::lock_guard lock(mutex_);
    if (queue_) lost_ += queue_lost();
    queue_.reset();
    files_.clear();
  }

  void close_folder(const std::string& folder) {
    const std::lock_guard lock(mutex_);
    if (!queue_) return;
    queue_->flush();
    files_.erase(folder);
  }

  int64_t lost() const {
    if (in_forked_child()) return 0;
    const std::lock_guard lock(mutex_);
    return lost_ + (queue_ ? queue_->lost() : 0);
  }

  std::atomic<bool> has_hyperparameters{false};

 private:
  int64_t queue_lost() {
    queue_->flush();
    return queue_->lost();
  }

  AppendFile& file(const std::string& folder) {
    if (!queue_) {
      queue_ = std::make_unique<observe::internal::EventQueue>(
          static_cast<size_t>(options_.max_queue), std::chrono::duration<double>(options_.flush_secs));
    }
    auto& known = files_[folder];
    if (!known) {
      const auto path =
          (folder.empty() ? log_dir_ : log_dir_ / folder) / event_file_name(options_.filename_suffix);
      known = std::make_unique<AppendFile>("SummaryWriter", path, AppendFile::Kind::kBinary);
      queue_->add(*known, observe::internal::file_version_event({observe::internal::wall_time()}));
      if (folder.empty()) purge(*known);
    }
    return *known;
  }

  /// PyTorch's two events: the version again, with the step, and the start of a session.
  void purge(AppendFile& file) {
    if (!purge_step_) return;
    const EventTime time{observe::internal::wall_time(), std::exchange(purge_step_, std::nullopt)};
    queue_->add(file, observe::internal::file_version_event(time));
    queue_->add(file, observe::internal::session_start_event(time));
  }

  const std::filesystem::path log_dir_;
  const SummaryWriterOptions options_;
  ForkGuard fork_guard_;  // in a child the mutex may be locked for ever
  WritingRank rank_;
  mutable std::mutex mutex_;
  std::optional<int64_t> purge_step_;
  int64_t lost_ = 0;  // before the last close()
  std::map<std::string, std::unique_ptr<AppendFile>> files_;
  std::unique_ptr<observe::internal::EventQueue> queue_;  // ends before the files that it writes
};

SummaryWriter::SummaryWriter(std::filesystem::path log_dir, SummaryWriterOptions options)
    : impl_(std::make_unique<Impl>(std::move(log_dir), std::move(options))) {}

SummaryWriter::~SummaryWriter() {
  if (impl_->in_forked_child()) {
    (void)impl_.release();  // its thread, for which a destructor would wait, belongs to the parent
    return;
  }
  close();
}

void SummaryWriter::add_scalar(const std::string& tag, double scalar_value,
                               std::optional<int64_t> global_step, std::optional<double> walltime,
                               bool new_style, bool double_precision) {
  if (!impl_->writes()) return;
  impl_->add("", global_step, walltime,
             observe::internal::scalar_summary(tag, scalar_value, new_style, double_precision));
}

void SummaryWriter::add_scalar(const std::string& tag, const at::Tensor& scalar_value,
                               std::optional<int64_t> global_step, std::optional<double> walltime,
                               bool new_style, bool double_precision) {
  TORCH_CHECK_VALUE(scalar_value.numel() == 1,
                    "Tensor should contain one element (0 dimensions). Was given size: ",
                    scalar_value.numel(), " and ", scalar_value.dim(), " dimensions.");
  if (!impl_->writes()) return;  // item() would wait for a device
  add_scalar(tag, scalar_value.item<double>(), global_step, walltime, new_style, double_precision);
}

void SummaryWriter::add_scalars(const std::string& main_tag, const Metrics& tag_scalar_dict,
                                std::optional<int64_t> global_step, std::optional<double> walltime) {
  if (!impl_->writes()) return;
  std::string folder = main_tag;
  std::replace(folder.begin(), folder.end(), '/', '_');
  const double time = walltime ? *walltime : observe::internal::wall_time();
  for (const auto& [tag, value] : tag_scalar_dict) {
    impl_->add(folder + "_" + tag, global_step, time,
               observe::internal::scalar_summary(main_tag, value, false, false));
  }
}

void SummaryWriter::add_histogram(const std::string& tag, const at::Tensor& values,
                                  std::optional<int64_t> global_step, const Bins& bins,
                                  std::optional<double> walltime, std::optional<int64_t> max_bins) {
  if (!impl_->writes()) return;
  impl_->add(
      "", global_step, walltime,
      observe::internal::histogram_summary(tag, observe::internal::make_histogram(values, bins, max_bins)));
}

void SummaryWriter::add_histogram_raw(const std::string& tag, double min, double max, double num, double sum,
                                      double sum_squares, const std::vector<double>& bucket_limits,
                                      const std::vector<double>& bucket_counts,
                                      std::optional<int64_t> global_step, std::optional<double> walltime) {
  TORCH_CHECK_VALUE(bucket_limits.size() == bucket_counts.size(),
                    "SummaryWriter::add_histogram_raw: ", bucket_limits.size(), " bucket_limits, but ",
                    bucket_counts.size(), " bucket_counts; give each bucket its upper end");
  if (!impl_->writes()) return;
  impl_->add("", global_step, walltime,
             observe::internal::histogram_summary(
                 tag, {min, max, num, sum, sum_squares, bucket_limits, bucket_counts}));
}

void SummaryWriter::add_image(const std::string& tag, const at::Tensor& img_tensor,
                              std::optional<int64_t> global_step, std::optional<double> walltime,
                              const std::string& dataformats) {
  if (!impl_->writes()) return;
  const at::Tensor image = observe::internal::to_image(img_tensor, dataformats);
  impl_->add("", global_step, walltime,
             observe::internal::image_summary(tag, image.size(0), image.size(1), image.size(2),
                                              observe::internal::encode_png(image)));
}

void SummaryWriter::add_images(const std::string& tag, const at::Tensor& img_tensor,
                               std::optional<int64_t> global_step, std::optional<double> walltime,
                               const std::string& dataformats) {
  add_image(tag, img_tensor, global_step, walltime, dataformats);
}

void SummaryWriter::add_text(const std::string& tag, const std::string& text_string,
                             std::optional<int64_t> global_step, std::optional<double> walltime) {
  if (!impl_->writes()) return;
  impl_->add("", global_step, walltime, observe::internal::text_summary(tag, text_string));
}

void SummaryWriter::add_hparams(const Hyperparameters& hparam_dict, const Metrics& metric_dict,
                                const DiscreteDomains& hparam_domain_discrete, const std::string& run_name,
                                std::optional<int64_t> global_step) {
  check_domains(hparam_dict, hparam_domain_discrete);
  if (!impl_->writes()) return;
  const std::string folder = run_name.empty() ? std::to_string(observe::internal::wall_time()) : run_name;
  impl_->add(folder, global_step, std::nullopt,
             observe::internal::experiment_summary(hparam_dict, metric_dict, hparam_domain_discrete));
  impl_->add(folder, global_step, std::nullopt, observe::internal::session_start_summary(hparam_dict));
  impl_->add(folder, global_step, std::nullopt, observe::internal::session_end_summary(/*success=*/true));
  for (const auto& [name, value] : metric_dict) {
    impl_->add(folder, global_step, std::nullopt,
               observe::internal::scalar_summary(name, value, false, false));
  }
  impl_->close_folder(folder);
}

void SummaryWriter::log_metrics(const Metrics& metrics, int64_t step) {
  for (const auto& [name, value] : metrics) add_scalar(name, value, step);
}

/// Without the message of the whole experiment, which names metrics that are not known yet: TensorBoard then
/// takes those of the run.
void SummaryWriter::log_hyperparameters(const Hyperparameters& hyperparameters) {
  if (!impl_->writes()) return;
  impl_->has_hyperparameters = true;
  impl_->add("", std::nullopt, std::nullopt, observe::internal::session_start_summary(hyperparameters));
}

void SummaryWriter::resume(int64_t next_step) {
  if (impl_->writes()) impl_->resume(next_step);
}

void SummaryWriter::flush() {
  impl_->flush();
}

void SummaryWriter::finalize(std::string_view status) {
  if (impl_->writes() && impl_->has_hyperparameters.exchange(false)) {
    impl_->add("", std::nullopt, std::nullopt, observe::internal::session_end_summary(status == "finished"));
  }
  close();
}

void SummaryWriter::close() {
  impl_->close();
}

const std::filesystem::path& SummaryWriter::get_logdir() const {
  return impl_->log_dir();
}

int64_t SummaryWriter::lost() const {
  return impl_->lost();
}

}  // namespace lockstep
