#include <cstdlib>
#include <gmock/gmock.h>
#include <sstream>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/doctor/doctor.h>
#include <lockstep/doctor/self_test.h>

namespace lockstep::doctor::self_test_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// This program started again runs this very test, and so comes to the same self-test.
std::vector<std::string> same_test() {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  return {"doctor_tests", std::string("--gtest_filter=") + info->test_suite_name() + "." + info->name(),
          "--gtest_brief=1"};
}

/// The self-test with a failpoint in both ranks.
Finding run_with(const char* failpoint, std::chrono::milliseconds timeout = 60s) {
  // What is set here after the start of this process arms the children only.
  ::setenv("LOCKSTEP_FAILPOINTS", failpoint, 1);
  Finding finding = run_self_test({.argv = same_test(), .timeout = timeout});
  ::unsetenv("LOCKSTEP_FAILPOINTS");
  return finding;
}

TEST(SelfTest, TwoRanksAgree) {
  const Finding finding = run_self_test({.argv = same_test()});
  EXPECT_EQ(finding.severity, Severity::kOk) << finding.message;
  EXPECT_THAT(finding.message, HasSubstr("right values"));
}

TEST(SelfTest, AnErrorIsTold) {
  const Finding finding = run_with("doctor_self_test=error(no luck)");
  EXPECT_EQ(finding.severity, Severity::kProblem);
  EXPECT_THAT(finding.message, HasSubstr("of two: c10::Error: failpoint doctor_self_test: no luck"));
  EXPECT_NE(finding.remedy, "");
}

TEST(SelfTest, AnEndIsTold) {
  const Finding finding = run_with("doctor_self_test=kill(9)");
  EXPECT_EQ(finding.severity, Severity::kProblem);
  EXPECT_THAT(finding.message, HasSubstr("terminated with signal SIGKILL"));
}

TEST(SelfTest, AHangEndsAtTheTimeout) {
  const Finding finding = run_with("doctor_self_test=kill(19)", 2s);
  EXPECT_EQ(finding.severity, Severity::kProblem);
  EXPECT_THAT(finding.message, HasSubstr("did not end within 2000 ms"));
}

TEST(Doctor, ExaminesThisMachine) {
  std::ostringstream out;
  DoctorOptions options;
  options.self_test_argv = same_test();
  const int status = examine(options, out);
  EXPECT_THAT(out.str(),
              AllOf(HasSubstr("self-test"), HasSubstr("memfd"), HasSubstr("torch"), HasSubstr("problem")));
  EXPECT_EQ(status, out.str().find("\n0 problems") == std::string::npos ? 1 : 0);
}

TEST(Doctor, RefusesToDoNothing) {
  std::ostringstream out;
  EXPECT_THROW(examine({.machine = false, .self_test = false}, out), c10::ValueError);
  EXPECT_THROW(examine({.timeout = 0s}, out), c10::ValueError);
}

}  // namespace
}  // namespace lockstep::doctor::self_test_test
