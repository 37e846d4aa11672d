#include <cstdlib>
#include <gmock/gmock.h>
#include <thread>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/rendezvous/host_identity.h>
#include <lockstep/rendezvous/process_watch.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::host_identity_test {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

/// On a thread that pretends the host.
HostIdentity identity_on(const std::string& host) {
  HostIdentity identity;
  std::thread([&] {
    pretend_host(host);
    identity = this_host();
  }).join();
  return identity;
}

TEST(HostIdentity, SameBootAndNamespaces) {
  const auto here = this_host();
  EXPECT_FALSE(here.boot_id.empty());
  EXPECT_NE(here.network_namespace, 0U);
  EXPECT_FALSE(here.is_pretended());
  const auto parsed = HostIdentity::parse(here.to_string());
  EXPECT_EQ(parsed, here);
  EXPECT_EQ(parsed.to_string(), here.to_string());
  EXPECT_EQ(parsed.hostname, here.hostname);
  auto renamed = here;
  renamed.hostname = "renamed";
  EXPECT_EQ(renamed, here) << "a container may have a name of its own and share everything else";
  EXPECT_EQ(renamed.key(), here.key());
  for (auto member :
       {&HostIdentity::network_namespace, &HostIdentity::pid_namespace, &HostIdentity::user_namespace}) {
    auto container = here;
    ++(container.*member);
    EXPECT_FALSE(container == here);
    EXPECT_NE(container.key(), here.key());
    EXPECT_EQ(HostIdentity::parse(container.to_string()), container);
  }
}

TEST(HostIdentity, RefusesWhatNoRankWrote) {
  for (const char* text : {"", "a", "a 1", "a x host", " 1 host", "a 1 ", "a -1 host", "a 1/2 host",
                           "a 1/2/3/4 host", "a 1/2/x host", "a 1/2/ host", "a /1 host", "a 1// host"}) {
    EXPECT_THROW(HostIdentity::parse(text), c10::ValueError) << text;
  }
  const auto without = HostIdentity::parse("boot 7 host");
  EXPECT_EQ(without.network_namespace, 7U);
  EXPECT_EQ(without.pid_namespace, 0U);
}

TEST(HostIdentity, PretendedHostsAreToldApartByName) {
  const auto here = this_host();
  const auto a = identity_on("host-a");
  EXPECT_TRUE(a.is_pretended());
  EXPECT_EQ(a.hostname, "host-a");
  EXPECT_EQ(a.boot_id, here.boot_id) << "clocks of one boot are comparable, pretended hosts or not";
  EXPECT_EQ(a, identity_on("host-a"));
  EXPECT_FALSE(a == identity_on("host-b"));
  EXPECT_NE(a.key(), identity_on("host-b").key());
  EXPECT_FALSE(a == here);
  EXPECT_EQ(HostIdentity::parse(a.to_string()), a);
  EXPECT_EQ(this_host(), here) << "another thread's host";
}

TEST(HostIdentity, TheEnvironmentPretendsAHostForTheProcess) {
  ::setenv("LOCKSTEP_TEST_HOST", "host-a", 1);
  EXPECT_EQ(this_host(), identity_on("host-a"));
  EXPECT_EQ(identity_on("host-b").hostname, "host-b") << "the thread's comes first";
  const auto process = this_process();
  EXPECT_EQ(process.host.hostname, "host-a");
  for (const char* name : {"a b", "a\n", "\xff"}) {
    ::setenv("LOCKSTEP_TEST_HOST", name, 1);
    EXPECT_THAT(message_of<c10::ValueError>([] { this_host(); }), HasSubstr("LOCKSTEP_TEST_HOST is '"));
  }
  ::setenv("LOCKSTEP_TEST_HOST", std::string(65, 'a').c_str(), 1);
  EXPECT_THROW(this_host(), c10::ValueError);
  ::setenv("LOCKSTEP_TEST_HOST", "", 1);
  EXPECT_FALSE(this_host().is_pretended());
  ::unsetenv("LOCKSTEP_TEST_HOST");
}

TEST(HostIdentity, AProcessOfAPretendedHostIsWatchedFromThereOnly) {
  const auto own = this_process();
  auto there = own;
  there.host = identity_on("host-a");
  EXPECT_FALSE(ProcessWatch(there, own).can_tell());
  EXPECT_TRUE(ProcessWatch(there, there).can_tell());
}

}  // namespace
}  // namespace lockstep::host_identity_test
