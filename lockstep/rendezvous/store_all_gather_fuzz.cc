// A store in which another program left any values where store_all_gather() has its own: it returns what was
// published or throws a c10::Error, and does so at once. Likewise the identity of a host, which ranks
// publish.
//
// The input is lines KEY=VALUE, put below the all-gather's key before rank 1 of 2 comes.
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <string>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <lockstep/rendezvous/host_identity.h>
#include <lockstep/rendezvous/process_watch.h>
#include <lockstep/rendezvous/protocol_version.h>
#include <lockstep/rendezvous/store_all_gather.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::store_all_gather_fuzz {
namespace {

void gather_with(const std::string& text) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(std::chrono::milliseconds(1));
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const size_t equals = std::min(text.find('=', begin), end);
    const std::string value = equals < end ? text.substr(equals + 1, end - equals - 1) : "";
    store->set("meeting/" + text.substr(begin, equals - begin), {value.begin(), value.end()});
    begin = end + 1;
  }
  try {
    const auto all =
        store_all_gather(*store, "meeting", 1, 2, "mine", Deadline::after(std::chrono::seconds(0)));
    if (all.size() != 2 || all[1] != "mine") std::abort();
  } catch (const c10::Error&) {
    // no rank came, or one came twice
  }
}

void parse_identity(const std::string& text) {
  try {
    const auto host = HostIdentity::parse(text);
    if (!(HostIdentity::parse(host.to_string()) == host)) std::abort();
  } catch (const c10::ValueError&) {
    // what is documented
  }
}

void parse_process(const std::string& text) {
  try {
    const auto process = ProcessIdentity::parse(text);
    if (ProcessIdentity::parse(process.to_string()).to_string() != process.to_string()) std::abort();
  } catch (const c10::ValueError&) {
    // what is documented
  }
}

std::vector<std::string> seeds() {
  const std::string version = std::to_string(kProtocolVersion);
  const std::string size = "size=2 " + version + " rank 0\n";
  return {
      "claim/0=1\nwho/0=process 7 on host\n" + size + "data/0=bytes\ncount=1\nseen=0\n",
      "claim/1=1\nwho/1=process 8 on host\n",
      "size=3 " + version + " rank 0\noutcome=late: rank 1 of 3 did not join\n",
      "size=2\n",
      "size=2 9 rank 0, process 7 on host, runs Lockstep 9.1 (messages of version 9)\n",
      "outcome=complete\ndata/0=bytes\ncount=2\nseen=2\n",
      size + "count=0\nclaim/1=0\nseen=0\n",
      "8f14e45f-ceea-467f-9d3b-0d2b5e1f2a3c 4026531840/4026531836/4026531837 host-1",
      "8f14e45f-ceea-467f-9d3b-0d2b5e1f2a3c 0 pretended",
      "4242 123456 8f14e45f-ceea-467f-9d3b-0d2b5e1f2a3c 4026531840 host-1",
  };
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(store_all_gather, seeds) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  gather_with(text);
  parse_identity(text);
  parse_process(text);
  return 0;
}

}  // namespace lockstep::store_all_gather_fuzz
