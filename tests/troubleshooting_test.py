"""docs/troubleshooting.md quotes messages as the sources have them."""

import pathlib
import re

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "troubleshooting.md"
SOURCES = [
    *(path for room in ("lockstep", "cli") for kind in ("*.cc", "*.h") for path in (REPOSITORY / room).rglob(kind)),
    *(REPOSITORY / "python" / "lockstep").glob("*.py"),
    *(path for path in (REPOSITORY / "scripts").rglob("*") if path.is_file() and not path.name.endswith(".py")),
]
# Between two pieces of one text: nothing, a comma of c10::str() and TORCH_CHECK, <<, +, Python's f.
BETWEEN = re.compile(r'(?<!\\)"\s*(?:,|<<|\+|(?=f?"))\s*f?"')


def is_source(path: pathlib.Path) -> bool:
    return not re.search(r"_test\.|_fuzz\.|/testing/", str(path))


def one_piece(text: str) -> str:
    """The source with each text that is written in several pieces in one, without what quotes need."""
    text = re.sub(r"(?m)(^|[ \t])[ \t]*//.*", "", text)
    return BETWEEN.sub("", text).replace('\\"', '"')


TEXTS = {path: one_piece(path.read_text(errors="ignore")) for path in SOURCES if is_source(path)}


def quoted() -> list:
    """The messages of the page: the first cell of each row, without the table's head and line."""
    return re.findall(r"^\| `([^`]+)`", PAGE.read_text(), re.M)


def fixed_words(message: str) -> list:
    """What stands between the marks for what varies, but for single signs."""
    pieces = [piece.strip() for piece in message.replace("\\|", "|").split("…")]
    return [piece for piece in pieces if len(piece) > 2]


def is_in(words: list, text: str) -> bool:
    """Whether the text has all the words, in their order, near each other."""
    pattern = r"[\s\S]{0,120}?".join(map(re.escape, words))
    return re.search(pattern, text) is not None


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_one_that_a_source_has(message):
    words = fixed_words(message)
    assert sum(map(len, words)) >= 12, f"'{message}' has too few words to search for"
    assert any(is_in(words, text) for text in TEXTS.values()), f"no source says '{message}'"


def test_no_message_stands_twice():
    assert len(quoted()) == len(set(quoted())) >= 25


def test_the_anchors_that_messages_name_are_on_the_page():
    named = {anchor for text in TEXTS.values() for anchor in re.findall(r"troubleshooting\.md#([\w-]+)", text)}
    headings = re.findall(r"^#+ (.*)$", PAGE.read_text(), re.M)
    assert len(named) >= 2 and named <= {heading.lower().replace(" ", "-") for heading in headings}


def test_the_search_sees_a_changed_word():
    text = one_piece('TORCH_CHECK(false, "rank ", rank, " has "\n    "left", " the group \\"x\\""); // "gone"')
    assert is_in(fixed_words('rank … has left the group "x"'), text)
    assert not is_in(["has gone"], text) and not is_in(["the group", "has left"], text)
