#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::rendezvous_internal {

/// Where the processes of one MPI job on one host tell each other the port of their store: a small file in a
/// directory that only this user can enter.
///
/// The file's name contains the launcher's process (mpirun, orted, hydra_pmi_proxy … among this process's
/// ancestors, by pid and start time), the boot and the job's id, so that what an earlier job left behind has
/// another name. It appears whole, by rename(2).
class JobFile {
 public:
  /// `job` as in JobMeeting. Throws c10::ValueError when neither it nor an ancestor tells jobs apart, and
  /// c10::DistStoreError when no directory can be used.
  static JobFile of_job(const std::string& job);
  /// For tests: a given file.
  explicit JobFile(std::string path) : path_(std::move(path)) {}

  const std::string& path() const { return path_; }

  /// Rank 0: writes the port, in place of whatever is there. Throws c10::DistStoreError.
  void publish(uint16_t port) const;
  /// The others: the port, or nothing as long as the file is not there.
  std::optional<uint16_t> read() const;
  /// Rank 0, when all have read it. Never throws.
  void remove() const;

 private:
  std::string path_;
};

}  // namespace lockstep::rendezvous_internal
