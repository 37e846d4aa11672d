#include <gmock/gmock.h>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/host_name.h>
#include <lockstep/launch/agent/remote_hosts.h>
#include <lockstep/launch/agent/shell_words.h>

namespace lockstep::launch::remote_hosts_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(RemoteHosts, AreReadAsMpirunAndHorovodrunHaveThem) {
  EXPECT_THAT(parse_remote_hosts("a:2,b:4", 0), ElementsAre(RemoteHost{"a", 2}, RemoteHost{"b", 4}));
  EXPECT_THAT(parse_remote_hosts("a,user@b", 0), ElementsAre(RemoteHost{"a", 1}, RemoteHost{"user@b", 1}));
  EXPECT_THAT(parse_remote_hosts("[fd00::1]:2,10.0.0.1:3", 0),
              ElementsAre(RemoteHost{"fd00::1", 2}, RemoteHost{"10.0.0.1", 3}));
  EXPECT_THAT(parse_remote_hosts("a:2,b:4,c:2", 3), ElementsAre(RemoteHost{"a", 2}, RemoteHost{"b", 1}));
  EXPECT_EQ(parse_remote_hosts("user@b:2", 0).front().address(), "b");
}

TEST(RemoteHosts, RefuseWhatIsNone) {
  for (const std::string text : {"", ",", "a:", "a:0", "a:-1", "a:x", ":2", "user@:2", "a:70000",
                                 "-oProxyCommand=x", "a,a:2", "fd00::1"}) {
    EXPECT_THROW(parse_remote_hosts(text, 0), c10::ValueError) << text;
  }
  try {
    parse_remote_hosts("a:2,b:2", 5);
    ADD_FAILURE();
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what(), HasSubstr("-n is 5, and the hosts of -H have 4 slots"));
  }
}

TEST(RemoteHosts, NeedAShellUnlessTheyAreThisOne) {
  RemoteRun run;
  run.shell = {"ssh", "-T"};
  const RemoteRun::Agent here = {{host_name(), 1}, {"/bin/lockstep", "run", "./train"}};
  EXPECT_EQ(start_words(run, here), here.words);
  const std::vector<std::string> words = start_words(run, {{"user@b", 1}, {"/bin/lockstep", "run", "a b"}});
  ASSERT_EQ(words.size(), 4u);
  EXPECT_THAT(std::vector<std::string>(words.begin(), words.begin() + 3), ElementsAre("ssh", "-T", "user@b"));
  EXPECT_THAT(words.back(), HasSubstr(" || exit 126; exec /bin/lockstep run 'a b'"));
  EXPECT_THAT(words.back(), ::testing::StartsWith("cd /"));
}

TEST(ShellWords, AreQuotedWhereAShellWouldChangeThem) {
  EXPECT_EQ(shell_words({"a", "b c", "", "it's", "$HOME", "-x=1"}), "a 'b c' '' 'it'\\''s' '$HOME' -x=1");
}

}  // namespace
}  // namespace lockstep::launch::remote_hosts_test
