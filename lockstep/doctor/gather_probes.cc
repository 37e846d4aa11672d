#include <algorithm>
#include <arpa/inet.h>
#include <array>
#include <cerrno>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <future>
#include <ifaddrs.h>
#include <memory>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sstream>
#include <stdexcept>
#include <sys/mman.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/files/kernel_file.h>
#include <lockstep/base/host_name.h>
#include <lockstep/base/process/pidfd.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/doctor/gather.h>
#include <lockstep/doctor/internal/command.h>
#include <lockstep/doctor/internal/files.h>
#include <lockstep/rendezvous/network/network_interface.h>
#include <lockstep/transport/host/memory/segment.h>
#include <lockstep/transport/local_socket.h>
#include <lockstep/transport/wire/ucx_engine.h>

namespace lockstep::doctor {

using internal::find_in_path;
using internal::run_command;

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kCommandTimeout{10};
constexpr seconds kResolutionTimeout{5};

/// A step of a probe; errno says why it failed.
void expect(bool succeeded, const char* step) {
  if (!succeeded) throw std::runtime_error(std::string(step) + ": " + std::strerror(errno));
}

template <class Action>
Probe try_out(Action&& action) {
  try {
    action();
    return {true, ""};
  } catch (const std::exception& error) {
    return {false, text_of(error)};
  }
}

/// As the transport makes its segments, sealed and mapped.
void probe_memfd() {
  transport::Segment::create(1 << 16)->data()[0] = std::byte{1};
}

/// A descriptor over a unix socket, as peers hand their segments over.
void probe_fd_passing() {
  int ends[2] = {-1, -1};
  expect(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0, "socketpair");
  const UniqueFd left(ends[0]);
  const UniqueFd right(ends[1]);
  const UniqueFd file(::memfd_create("lockstep-doctor", MFD_CLOEXEC));
  expect(static_cast<bool>(file), "memfd_create");
  char byte = 'x';
  expect(transport::send_with_fd(left.get(), &byte, 1, file.get()), "sendmsg with a descriptor");
  errno = EBADF;
  expect(static_cast<bool>(transport::receive_with_fd(right.get(), &byte, 1)),
         "no descriptor came with the message");
}

void probe_pidfd() {
  expect(static_cast<bool>(open_pidfd(::getpid())), "pidfd_open");
}

void probe_loopback() {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  expect(static_cast<bool>(listener), "socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  expect(::bind(listener.get(), generic, length) == 0, "bind to 127.0.0.1");
  expect(::listen(listener.get(), 1) == 0, "listen on 127.0.0.1");
  expect(::getsockname(listener.get(), generic, &length) == 0, "getsockname");
  const UniqueFd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  timeval limit{2, 0};  // a firewall may drop the packets
  ::setsockopt(client.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  expect(::connect(client.get(), generic, length) == 0, "connect to 127.0.0.1");
}

std::string address_text(const sockaddr* address) {
  const socklen_t length = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  std::array<char, NI_MAXHOST> host{};
  const bool good = ::getnameinfo(address, length, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) == 0;
  return good ? host.data() : "";
}

std::vector<Interface> gather_interfaces(const std::string& root) {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return {};
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(first, ::freeifaddrs);
  std::vector<Interface> interfaces;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    auto found = std::find_if(interfaces.begin(), interfaces.end(),
                              [&](const Interface& each) { return each.name == entry->ifa_name; });
    if (found == interfaces.end()) {
      Interface made;
      made.name = entry->ifa_name;
      made.up = (entry->ifa_flags & IFF_UP) != 0 && (entry->ifa_flags & IFF_RUNNING) != 0;
      made.loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
      const auto speed = read_kernel_integer(root + "/sys/class/net/" + made.name + "/speed");
      if (speed.value_or(-1) > 0) made.speed_mbit = static_cast<int>(*speed);
      found = interfaces.insert(interfaces.end(), std::move(made));
    }
    const sockaddr* address = entry->ifa_addr;
    if (address != nullptr && (address->sa_family == AF_INET || address->sa_family == AF_INET6)) {
      found->addresses.push_back(address_text(address));
    }
  }
  return interfaces;
}

struct Resolution {
  int error = 0;
  std::vector<std::string> addresses;
};

Resolution resolve(const std::string& name) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* first = nullptr;
  Resolution result;
  result.error = ::getaddrinfo(name.c_str(), nullptr, &wanted, &first);
  if (result.error != 0) return result;
  for (const addrinfo* entry = first; entry != nullptr; entry = entry->ai_next) {
    result.addresses.push_back(address_text(entry->ai_addr));
  }
  ::freeaddrinfo(first);
  return result;
}

/// A name server that does not answer takes half a minute: the thread is left behind then.
void gather_resolution(Network& network) {
  network.hostname = host_name();
  const auto begin = std::chrono::steady_clock::now();
  std::packaged_task<Resolution()> task([host = network.hostname] { return resolve(host); });
  auto answer = task.get_future();
  std::thread(std::move(task)).detach();
  const bool answered = answer.wait_for(kResolutionTimeout) == std::future_status::ready;
  network.resolution_time =
      std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - begin);
  if (!answered) {
    network.resolution.error = "no answer within 5 s";
    return;
  }
  const Resolution result = answer.get();
  network.resolution = {result.error == 0, result.error == 0 ? "" : ::gai_strerror(result.error)};
  network.resolved = result.addresses;
}

/// Empty where no interface fits what the variables say, which is judged with them.
std::string interface_for_hosts() {
  try {
    return interface_between_hosts(environment::text("MASTER_ADDR").value_or("")).name;
  } catch (const c10::Error&) {
    return "";
  }
}

/// Opens it as a rank would, which sets UCX's variables for this process and those that it starts.
void try_ucx(Ucx& ucx, const std::string& interface) {
  ucx.missing = transport::wire::why_no_ucx();
  if (!ucx.missing.empty()) return;
  try {
    ucx.engine = transport::wire::make_ucx_engine(0, {.interface = interface})->describe();
  } catch (const std::exception& error) {
    ucx.error = text_of(error);
  }
}

void ask_nvidia_smi(Gpu& gpu) {
  const auto program = find_in_path("nvidia-smi");
  if (!program) return;
  const auto result =
      run_command({*program, "--query-gpu=name,memory.total", "--format=csv,noheader"}, kCommandTimeout);
  if (!result.succeeded()) {
    gpu.smi_error = result.timed_out ? "it did not end within 10 s" : result.output;
    return;
  }
  std::istringstream lines(result.output);
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty()) gpu.smi_names.push_back(line);
  }
}

void ask_cuda_driver(Gpu& gpu) {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    gpu.cuda_error = why == nullptr ? "libcuda.so.1 can't be loaded" : why;
    return;
  }
  gpu.cuda_library = true;
  using Init = int (*)(unsigned);
  using Count = int (*)(int*);
  auto init = reinterpret_cast<Init>(::dlsym(library, "cuInit"));
  auto count = reinterpret_cast<Count>(::dlsym(library, "cuDeviceGetCount"));
  if (init == nullptr || count == nullptr) {
    gpu.cuda_error = "libcuda.so.1 lacks cuInit";
    return;
  }
  constexpr int kNoDevice = 100;  // CUDA_ERROR_NO_DEVICE
  int devices = 0;
  int error = init(0);
  if (error == 0) error = count(&devices);
  if (error == 0 || error == kNoDevice) {
    gpu.cuda_devices = devices;
  } else {
    gpu.cuda_error = "the driver answers with CUDA error " + std::to_string(error);
  }
}

}  // namespace

void gather_probes(Facts& facts, const std::string& root) {
  facts.memfd = try_out(probe_memfd);
  facts.fd_passing = try_out(probe_fd_passing);
  facts.pidfd = try_out(probe_pidfd);
  facts.network.loopback_tcp = try_out(probe_loopback);
  facts.network.interfaces = gather_interfaces(root);
  gather_resolution(facts.network);
  facts.network.between_hosts = interface_for_hosts();
  try_ucx(facts.ucx, facts.network.between_hosts);
  ask_nvidia_smi(facts.gpu);
  // A driver that hangs would take this process with it; nvidia-smi has found that out.
  if (facts.gpu.smi_error.empty()) ask_cuda_driver(facts.gpu);
}

}  // namespace lockstep::doctor
