#pragma once

#include <string>
#include <ucp/api/ucp.h>

// Of <ucp/api/ucp.h>, which only some builds have: for ucx_engine.cc and ucx_worker.cc alone.
namespace lockstep::transport::internal {

#define LOCKSTEP_UCX_FUNCTIONS(each) \
  each(ucp_cleanup);                 \
  each(ucp_config_modify);           \
  each(ucp_config_read);             \
  each(ucp_config_release);          \
  each(ucp_context_print_info);      \
  each(ucp_dt_create_generic);       \
  each(ucp_dt_destroy);              \
  each(ucp_ep_close_nbx);            \
  each(ucp_ep_create);               \
  each(ucp_get_version_string);      \
  each(ucp_init_version);            \
  each(ucp_request_cancel);          \
  each(ucp_request_free);            \
  each(ucp_tag_recv_nbx);            \
  each(ucp_tag_send_nbx);            \
  each(ucp_worker_arm);              \
  each(ucp_worker_create);           \
  each(ucp_worker_destroy);          \
  each(ucp_worker_get_address);      \
  each(ucp_worker_get_efd);          \
  each(ucp_worker_progress);         \
  each(ucp_worker_release_address);  \
  each(ucs_status_string)

/// UCX's functions, from the library that is found at run time: libucp.so.0, or the file that
/// LOCKSTEP_UCX_LIBRARY names. Programs on one host so need none. Loaded once, never unloaded. Thread-safe.
struct UcxLibrary {
#define LOCKSTEP_UCX_MEMBER(name) decltype(&::name) name = nullptr
  LOCKSTEP_UCX_FUNCTIONS(LOCKSTEP_UCX_MEMBER);
#undef LOCKSTEP_UCX_MEMBER

  /// Loads the library at the first call, and sets what UCX reads from the environment, unless the user has
  /// set it; `port_range` ("20000-20100", or empty) counts unless an earlier call had one. Throws c10::DistBackendError
  /// that says what to install when it can't be loaded.
  ///
  /// setenv(3) is not safe while other threads call getenv(3). The first call comes from
  /// init_process_group(), before the threads of the job's groups are started; a program whose own threads
  /// read the environment meanwhile sets the variables itself (none is written then), or starts them later.
  static const UcxLibrary& load(const std::string& port_range);
};

}  // namespace lockstep::transport::internal
