#pragma once

#include <optional>
#include <string>

#include <lockstep/transport/internal/ucx_library.h>

namespace lockstep::transport::internal {

/// What an engine sets up of UCX: a context with the devices that it may use, a worker, and a datatype by which UCX takes
/// and brings messages. Not thread-safe.
class UcxWorker {
 public:
  /// `interface`: as UcxOptions::interface. Throws c10::DistBackendError that names the interface and what UCX says.
  UcxWorker(const UcxLibrary& ucx, const std::string& interface, const ucp_generic_dt_ops_t& type);

  ucp_worker_h worker() const { return handles_.worker; }
  ucp_datatype_t datatype() const { return *handles_.datatype; }
  /// Readable when an armed worker has something to do.
  int event_fd() const { return event_fd_; }
  /// By which other workers connect.
  const std::string& address() const { return address_; }
  /// "UCX 1.13.1 (tcp/eth0, at 10.0.0.1:20003)"
  const std::string& description() const { return description_; }

 private:
  struct Handles {
    explicit Handles(const UcxLibrary& library) : ucx(library) {}
    ~Handles();  // the worker first: it may give messages back, which needs the datatype

    const UcxLibrary& ucx;
    ucp_context_h context = nullptr;
    std::optional<ucp_datatype_t> datatype = {};
    ucp_worker_h worker = nullptr;
  };

  void open(const std::string& interface, const ucp_generic_dt_ops_t& type);
  void check(ucs_status_t status, const std::string& what) const;
  std::string devices() const;

  const UcxLibrary& ucx_;
  Handles handles_;
  int event_fd_ = -1;  // the worker's
  std::string address_;
  std::string description_;
};

}  // namespace lockstep::transport::internal
