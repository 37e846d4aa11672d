#include <cstdlib>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/text/lower_case.h>
#include <lockstep/base/text/parse_number.h>

namespace lockstep::environment {

std::optional<std::string> text(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

int64_t parse_integer(const char* name, const std::string& value, int64_t low, int64_t high) {
  const auto number = parse_number<int64_t>(value);
  TORCH_CHECK_VALUE(number, "environment variable ", name, " is '", value,
                    "', which is not a whole number; set it to a number or unset it");
  TORCH_CHECK_VALUE(*number >= low && *number <= high, "environment variable ", name, " is ", *number,
                    ", which is outside ", low, " to ", high);
  return *number;
}

std::optional<int64_t> integer(const char* name, int64_t low, int64_t high) {
  auto value = text(name);
  if (!value) return std::nullopt;
  return parse_integer(name, *value, low, high);
}

bool flag(const char* name) {
  const std::string value = lower_case(text(name).value_or("0"));
  if (value == "1" || value == "true" || value == "yes" || value == "on") return true;
  TORCH_CHECK_VALUE(value == "0" || value == "false" || value == "no" || value == "off",
                    "environment variable ", name, " is '", value, "'; it takes 1 or 0");
  return false;
}

}  // namespace lockstep::environment
