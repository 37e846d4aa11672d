#include <gmock/gmock.h>
#include <string>

#include <gtest/gtest.h>

#include <lockstep/profiler/profile_settings.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::profiler::profile_settings_test {
namespace {

using lockstep::testing::message_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(ProfileSettings, ReadsWords) {
  const ProfileSettings settings = parse_profile_settings(
      "wait:2,warmup:0,active:5,repeat:0,skip_first:7,shapes,memory,stack,flops,gzip,on_signal,as:gloo,dir=/"
      "a,b:c");
  EXPECT_EQ(settings.schedule.wait, 2);
  EXPECT_EQ(settings.schedule.warmup, 0);
  EXPECT_EQ(settings.schedule.active, 5);
  EXPECT_EQ(settings.schedule.repeat, 0);
  EXPECT_EQ(settings.schedule.skip_first, 7);
  EXPECT_TRUE(settings.record_shapes && settings.profile_memory && settings.with_stack &&
              settings.with_flops && settings.gzip && settings.on_signal);
  EXPECT_EQ(settings.collectives_as, "gloo");
  EXPECT_EQ(settings.dir, "/a,b:c");
}

TEST(ProfileSettings, OneMeansAsIsUsual) {
  const ProfileSettings settings = parse_profile_settings("1");
  EXPECT_EQ(settings.schedule.active, 3);
  EXPECT_EQ(settings.schedule.repeat, 1);
  EXPECT_EQ(settings.dir, "./log/profiler");
  EXPECT_FALSE(settings.on_signal);
  EXPECT_FALSE(settings.is_done(4));
  EXPECT_TRUE(settings.is_done(5));
}

TEST(ProfileSettings, NamesWhatItDoesNotKnow) {
  for (const char* text : {"wait", "pause:1", "shapes:1", "as:mpi", "dir=", "0", "wait:-1", "active:0",
                           "active:", "repeat:1x", "warmup:99999999999"}) {
    EXPECT_THAT(message_of<c10::ValueError>([&] { parse_profile_settings(text); }),
                AllOf(HasSubstr("LOCKSTEP_PROFILE has '" + std::string(text) + "'"), HasSubstr("dir=PATH")))
        << text;
  }
  for (const char* text : {"wait:1,,active:1", ","}) {
    EXPECT_THAT(message_of<c10::ValueError>([&] { parse_profile_settings(text); }),
                HasSubstr("LOCKSTEP_PROFILE has ''"))
        << text;
  }
}

}  // namespace
}  // namespace lockstep::profiler::profile_settings_test
