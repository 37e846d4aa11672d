// Any bytes as a text: numbers that give the same bytes back, or a c10::Error that is not about memory.
#include <cstdlib>
#include <string_view>

#include <c10/util/Exception.h>

#include <lockstep/data/datasets/text_dataset.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::text_dataset_fuzz {
namespace {

std::vector<std::string> seeds() {
  return {"In the beginning", "\u00fc\u20ac\U0001f600", std::string("\0\x7f", 2),
          "\xf4\x8f\xbf\xbf\xed\x9f\xbf\xc2\x80"};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(text_dataset, seeds) {
  using lockstep::data::TextVocabulary;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto bytes = TextVocabulary::bytes();
  if (bytes.decode(bytes.encode(text)) != text) std::abort();
  try {
    const auto vocabulary = TextVocabulary::characters_of(text);
    if (vocabulary.decode(vocabulary.encode(text)) != text) std::abort();
    const auto again = TextVocabulary::characters_of(vocabulary.characters());
    if (again.size() != vocabulary.size() || again.characters() != vocabulary.characters()) std::abort();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::ValueError&) {
    // what is documented
  }
  return 0;
}

}  // namespace lockstep::text_dataset_fuzz
