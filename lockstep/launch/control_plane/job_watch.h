#pragma once

#include <sys/types.h>
#include <vector>

#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/control_plane/frames.h>
#include <lockstep/launch/membership/messages.h>

namespace lockstep::launch {

/// The other end of a WatchServer: the reports of all hosts of a job, by an agent of this host. Used by one thread.
class JobWatch {
 public:
  /// The agents of this user on this host; for root, of all users.
  static std::vector<pid_t> agents();

  /// Throws c10::DistNetworkError where no agent of this user, or of root, answers there.
  explicit JobWatch(pid_t agent);

  /// Readable when read() has something to say.
  int fd() const { return socket_.get(); }
  /// Appends the reports that have come. False once the agent has ended.
  bool read(std::vector<Report>& reports);

 private:
  UniqueFd socket_;
  FrameReader frames_{kMostReportBytes};
};

}  // namespace lockstep::launch
