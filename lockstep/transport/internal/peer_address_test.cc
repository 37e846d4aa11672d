#include <gmock/gmock.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/transport/internal/peer_address.h>

namespace lockstep::transport::internal::peer_address_test {
namespace {

using ::testing::HasSubstr;

const std::string kToken = "00112233445566778899aabbccddeeff";
const std::string kRun = " 3 18446744073709551615 ";
const std::string kProcess = "4242 777 boot 4026531840/4026531836/4026531837 a host";

TEST(PeerAddress, IsReadAsItWasWritten) {
  const std::string text = "1000 lockstep-ab " + kToken + kRun + kProcess;
  const auto address = PeerAddress::parse(text);
  EXPECT_EQ(address.process.pid, 4242);
  EXPECT_EQ(address.process.start, 777u);
  EXPECT_EQ(address.process.host.pid_namespace, 4026531836u);
  EXPECT_EQ(address.uid, 1000u);
  EXPECT_EQ(address.socket_name, "lockstep-ab");
  EXPECT_EQ(address.token[0], 0x00);
  EXPECT_EQ(address.token[15], 0xff);
  EXPECT_EQ(address.generation.number, 3u);
  EXPECT_EQ(address.generation.run, 18446744073709551615u);
  EXPECT_EQ(address.process.host.network_namespace, 4026531840u);
  EXPECT_EQ(address.process.host.hostname, "a host");
  EXPECT_EQ(address.to_string(), text);
}

TEST(PeerAddress, RefusesWhatNoRankWrote) {
  const std::string bad_token = "zz" + kToken.substr(2);
  const std::string signed_token = "-1" + kToken.substr(2);
  const std::string host = " 1 boot 1 a host";
  for (const std::string& text :
       {std::string(), std::string("1000"), "1 name " + kToken + kRun + "0" + host,
        "1 name " + kToken + kRun + "-7" + host, "1 name " + kToken + kRun + "99999999999" + host,
        "1 name " + kToken + kRun + "7 -1 boot 1 a host", "-1 name " + kToken + kRun + kProcess,
        "1  " + kToken + kRun + kProcess, "1 name " + bad_token + kRun + kProcess,
        "1 name " + signed_token + kRun + kProcess, "1 name " + kToken + "0" + kRun + kProcess,
        "1 name " + kToken + kRun + "7 1 boot", "1 name " + kToken + " -3 1 " + kProcess,
        "1 name " + kToken + " 3 18446744073709551616 " + kProcess, "1 name " + kToken + " " + kProcess,
        "1 " + std::string(107, 'n') + " " + kToken + kRun + kProcess}) {
    try {
      PeerAddress::parse(text);
      ADD_FAILURE() << text << " was accepted";
    } catch (const c10::DistBackendError& error) {
      EXPECT_THAT(error.what(), HasSubstr("malformed peer address '" + text + "'"));
    }
  }
  EXPECT_NO_THROW(PeerAddress::parse("1 " + std::string(106, 'n') + " " + kToken + kRun + kProcess));
}

}  // namespace
}  // namespace lockstep::transport::internal::peer_address_test
