#pragma once

#include <map>
#include <string>
#include <sys/types.h>
#include <vector>

#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/control_plane/frames.h>
#include <lockstep/launch/control_plane/watch_greeting.h>
#include <lockstep/launch/membership/messages.h>

namespace lockstep::launch {

/// The other end of a WatchServer: the reports of all hosts of a job, by an agent of this host. Used by one thread.
class JobWatch {
 public:
  /// Connections to the agents of this user on this host; for root, of all users. Also to those in containers that share this
  /// network namespace, by their numbers in this process's pid namespace; those that it does not see are left out.
  static std::map<pid_t, UniqueFd> agents();

  /// One of agents(), and the connection to it.
  JobWatch(pid_t agent, UniqueFd connection);

  /// Readable when read() has something to say.
  int fd() const { return socket_.get(); }
  /// Appends the reports that have come. False once the agent has ended. Throws c10::DistNetworkError where the agent is of
  /// another version of Lockstep, whose reports can't be read here, and where too many programs watch the job already.
  bool read(std::vector<Report>& reports);

 private:
  void check(const WatchGreeting& greeting) const;

  pid_t agent_;
  UniqueFd socket_;
  bool greeted_ = false;
  std::string begin_;  // of what has come, until the agent has greeted
  FrameReader frames_{kMostReportBytes};
};

}  // namespace lockstep::launch
