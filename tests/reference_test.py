"""docs/reference says what the headers say: each public name has an entry, its declaration, and an example that runs."""

import pathlib
import re
import textwrap

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
PAGES = REPOSITORY / "docs" / "reference"
EXAMPLES = REPOSITORY / "tests" / "drivers" / "reference"
HEADERS = [
    REPOSITORY / "lockstep" / f"{name}.h"
    for name in (
        "collectives/functional",
        "collectives/objects",
        "serialization/object_conversion",
        "collectives/process_group",
    )
]


# ---- Reading C++


def closing(text: str, start: int) -> int:
    """Where the brace that opens at `start` is closed."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"nothing closes the brace at {text[start:start + 40]!r}")


def without_comments(text: str) -> str:
    text = re.sub(r"//.*|/\*[\s\S]*?\*/", "", text)
    return re.sub(r"^\s*#.*$", "", text, flags=re.M)


def declarations(text: str) -> list:
    """The declarations on the top level of a header or of its namespace lockstep, without what functions do."""
    text = without_comments(text)
    found, begin, place, parentheses = [], 0, 0, 0
    while place < len(text):
        parentheses += {"(": 1, ")": -1}.get(text[place], 0)
        head = text[begin:place].strip()
        if text[place] == ";" and parentheses == 0:
            found.append(head)
            begin = place + 1
        elif text[place] == "{" and parentheses == 0:
            kind = re.sub(r"^template <.*?>\s*(?=\w+ )", "", head, flags=re.S)
            if kind == "namespace lockstep":
                end = closing(text, place)
                text = text[: place + 1] + text[place + 1 : end] + " " + text[end + 1 :]
                begin = place + 1
            elif kind.startswith("namespace "):
                place = closing(text, place)  # not for users
                begin = place + 1
            elif re.match(r"(struct|class|enum) ", kind) or re.match(r"using \w+ =", kind):
                place = closing(text, place)
            else:
                found.append(head)
                place = closing(text, place)
                begin = place + 1
        place += 1
    return [public_part(each) for each in found if each]


def public_part(declaration: str) -> str:
    """Of a class what users may call; of its functions what they are called with."""
    declaration = re.sub(r"\s*\bprivate:.*\}", "}", declaration, flags=re.S)
    declaration = re.sub(r"\) noexcept : \w+\(.*?\) \{\}", ") noexcept;", declaration, flags=re.S)
    return re.sub(r"^inline ", "", declaration)


def name_of(declaration: str) -> str:
    """The name it declares; nothing for the specialisation of a template, which is no name of its own."""
    plain = re.sub(r"^template <.*?>\s*(?=\w+[: ])", "", declaration, flags=re.S)
    found = re.match(r"(?:using|struct|class|enum)\s+(?:\[\[\w+\]\]\s*)?(\w+)\s*(<)?", plain)
    if found:
        return "" if found[2] else found[1]
    found = re.search(r"(\w+)\(", plain)
    assert found, f"what is '{declaration}'?"
    return found[1]


def words_of(declaration: str) -> str:
    """The declaration on one line, in one spelling, however it is broken into lines."""
    return re.sub(r"\s*([^\w\s])\s*", r"\1", " ".join(declaration.split()))


def by_name(text: str) -> dict:
    """Declarations by the name they declare: functions may have several."""
    names = {}
    for declaration in declarations(text):
        if name := name_of(declaration):
            names.setdefault(name, []).append(words_of(declaration))
    return names


def regions(path: pathlib.Path) -> dict:
    """What stands between `// [NAME]` and `// [end]` in a source, by name."""
    found = re.findall(r"^ *// \[([^\]]+)\]\n([\s\S]*?)^ *// \[end\]$", path.read_text(), re.M)
    assert len(found) == len(dict(found)), f"{path} has a region twice"
    return {name: textwrap.dedent(text).strip() for name, text in found}


# ---- Reading pages


class Entry:
    """A section of a page: its heading names what it is about."""

    def __init__(self, page: pathlib.Path, heading: str, text: str):
        self.page, self.heading = page, heading
        self.names = heading.split(", ")
        self.blocks = [block.strip() for block in re.findall(r"^```cpp\n([\s\S]*?)^```$", text, re.M)]
        self.id = f"{page.stem}-{self.names[0]}"


def entries(page: pathlib.Path) -> list:
    parts = re.split(r"^## (.+)\n", page.read_text(), flags=re.M)
    return [Entry(page, *pair) for pair in zip(parts[1::2], parts[2::2], strict=True)]


def public_names() -> dict:
    return {name: words for header in HEADERS for name, words in by_name(header.read_text()).items()}


DECLARED = public_names()
ENTRIES = [entry for page in sorted(PAGES.glob("*.md")) if page.stem != "README" for entry in entries(page)]
each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)


# ---- The pages against the headers


def test_each_public_name_has_one_entry_and_no_entry_is_left_over():
    described = [name for entry in ENTRIES for name in entry.names]
    assert len(described) == len(set(described)), "a name has two entries"
    assert set(DECLARED) - set(described) == set(), "these have no entry in docs/reference"
    assert set(described) - set(DECLARED) == set(), "docs/reference describes these, which the headers don't have"


@each_entry
def test_the_declaration_is_the_headers(entry):
    assert entry.blocks, f"{entry.heading} in {entry.page.name} has no declaration"
    shown = by_name(entry.blocks[0])
    assert shown == {name: DECLARED[name] for name in entry.names}


@each_entry
def test_the_example_is_one_that_is_compiled_and_run(entry):
    compiled = regions(EXAMPLES / f"{entry.page.stem}.cc")
    is_type = re.match(r"using|struct|class|template<class T>struct", DECLARED[entry.names[0]][0])
    assert entry.blocks[1:] or is_type, f"{entry.heading} in {entry.page.name} has no example"
    if entry.blocks[1:]:
        assert entry.heading in compiled, f"{entry.page.stem}.cc has no region [{entry.heading}]"
        assert entry.blocks[1:] == [compiled[entry.heading]]


def test_each_compiled_example_is_shown():
    shown = {(entry.page.stem, entry.heading) for entry in ENTRIES if entry.blocks[1:]}
    there = {(source.stem, name) for source in EXAMPLES.glob("*.cc") for name in regions(source)}
    assert there - shown == set()


def test_the_examples_run_on_four_ranks(programs):
    if not (programs.bin_dir / "reference_examples").is_file():
        pytest.skip("reference_examples is not built")
    done = programs.lockstep_run(4, "reference_examples")
    assert done.status == 0, done.text
    assert all(f"rank {rank} has run all examples" in done.stdout for rank in range(4)), done.text


# ---- Links


def anchors(page: pathlib.Path) -> set:
    """The names that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```[\s\S]*?^```$", "", page.read_text(), flags=re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


DOCUMENTS = [*REPOSITORY.glob("*.md"), *sorted((REPOSITORY / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```[\s\S]*?^```$", "", page.read_text(), flags=re.M)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}, which is not there"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}, which has no such heading"


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_tables_are_whole(page):
    """After an empty line the rows of a table are text."""
    lines = re.sub(r"^```[\s\S]*?^```$", "", page.read_text(), flags=re.M).splitlines()
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""]):
        if line.startswith("|") and not before.startswith("|"):
            assert re.fullmatch(r"\|[ :|-]+\|", after.strip()), f"{page.name}: a row without a table: {line}"


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_headers_that_a_page_names_exist(page):
    for header in set(re.findall(r"\blockstep/[a-z]\w*/[\w/]+\.h\b", page.read_text())):
        assert (REPOSITORY / header).is_file(), f"{page.name} names {header}, which is not there"


def included_by(header: str, found: set) -> set:
    """`header` and the headers of Lockstep that it includes, with what those include."""
    if header not in found:
        found.add(header)
        for included in re.findall(r"#include <(lockstep/[^>]+)>", (REPOSITORY / header).read_text()):
            included_by(included, found)
    return found


def test_what_the_common_header_leaves_out_is_what_the_guide_says():
    common = included_by("lockstep/lockstep.h", set())
    for header in ["parallel/ddp/hooks/default_hooks.h", "parallel/ddp/hooks/powersgd_hook.h", "parallel/data_parallel/data_parallel.h", "data/datasets/idx.h",
                   "data/datasets/csv_dataset.h", "data/samplers/torch_sampler.h", "checkpoint/python_checkpoint.h"]:
        assert f"lockstep/{header}" not in common, f"docs/getting_started.md says that lockstep.h lacks {header}"
    for header in ["nn/join.h", "checkpoint/training_state.h", "train/trainer.h", "observe/summary_writer.h"]:
        assert f"lockstep/{header}" in common


# ---- Headers that declare what a page says

HOOKS = "lockstep/parallel/ddp/hooks"


def declares(header: str, name: str) -> bool:
    """Whether the header declares the name, more than as a class that is defined elsewhere."""
    text = without_comments((REPOSITORY / header).read_text())
    name = re.escape(name.rpartition("::")[2])
    kinds = rf"(?:class|struct|enum|enum class|using|constexpr \w+)\s+(?:\[\[\w+\]\]\s+)?{name}\b(?!\s*;)"
    return re.search(rf"\b{kinds}|template <class T>\s+struct {name};|TORCH_MODULE\({name}\)|[\w>&*]\s[&*]?{name}\(",
                     text) is not None


def header_rows(page: pathlib.Path) -> list:
    """[(names, header)] of a page's tables in which a cell is a header: what stands in code in the cells before it."""
    rows = []
    for line in re.findall(r"^\| .*\|$", page.read_text(), re.M):
        *cells, last = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if found := re.fullmatch(r"`(lockstep/[\w/]+\.h|\w+\.h)`", last):
            header = found[1] if "/" in found[1] else f"{HOOKS}/{found[1]}"
            names = [name for code in re.findall(r"`([^`]+)`", " ".join(cells)) for name in re.findall(r"[\w:]+", code)]
            rows.append((names, header))
    return rows


def test_each_name_is_declared_by_the_header_that_the_table_of_headers_says():
    rows = header_rows(REPOSITORY / "docs" / "headers.md")
    assert len(rows) > 80 and len({header for _, header in rows}) == len(rows), "a header has two rows"
    wrong = [f"{name}: {header}" for names, header in rows for name in names if not declares(header, name)]
    assert wrong == []


def test_the_table_of_headers_says_what_the_common_header_has():
    text = (REPOSITORY / "docs" / "headers.md").read_text()
    common = included_by("lockstep/lockstep.h", set())
    inside, outside = text.split("## Headers of their own")
    assert [header for header in re.findall(r"`(lockstep/\w+/[\w/]+\.h)`", inside) if header not in common] == []
    assert [header for header in re.findall(r"`(lockstep/\w+/[\w/]+\.h)`", outside) if header in common] == []
    includes = re.findall(r"#include <(lockstep/[^>]+)>", (REPOSITORY / "lockstep" / "lockstep.h").read_text())
    umbrellas = {"lockstep/optim/lr_scheduler.h", "lockstep/optim/swa_utils.h"}  # which declare nothing
    assert [header for header in includes if header not in inside and header not in umbrellas] == []


# Types that a header of the table has for other headers, or behind functions that are in the table.
UNLISTED = {
    *("PhaseAudience", "PhaseTimes", "PhaseWindow", "TellingAction", "TrainingPhase", "WaitingPhase"),  # training_phases.h
    *("LoaderProgress", "NoModel", "RoundRobin", "StrategyFor", "TrialState"),  # of the namespace train
    *("ComposedScheduler", "DdpCore", "LambdaScheduler", "LoadProblems", "MapConversion", "NcclGroup", "OverlappedZeroStep"),
    "PreparedLoad",
}


def types(text: str) -> list:
    """The classes, structs and enumerations of a header's namespaces, but not of those called internal."""
    found = []
    for declaration, inner in blocks(re.sub(r'"(?:\\.|[^"\\\n])*"', '""', without_comments(text))):
        if re.search(r"\bnamespace\b", declaration):
            found += types(inner) if re.search(r"namespace [\w:]+$", declaration) and "internal" not in declaration else []
        elif named := re.search(r"\b(?:class|struct|enum)\s+(?:\[\[\w+\]\]\s+)?(\w+)(?: final)?(?:\s*:(?!:)[\s\S]*)?$",
                                declaration):
            found.append(named[1])
    return found


def blocks(text: str) -> list:
    """[(what stands before a brace on the top level, what stands within it)]"""
    found, place = [], 0
    while (begin := text.find("{", place)) >= 0:
        end = closing(text, begin)
        found.append((re.split(r"[;}]", text[place:begin])[-1].strip(), text[begin + 1 : end]))
        place = end + 1
    return found


def test_the_table_of_headers_has_each_type_of_a_header_that_it_names():
    missing = []
    for names, header in header_rows(REPOSITORY / "docs" / "headers.md"):
        listed = {name.rpartition("::")[2] for name in names} | UNLISTED
        missing += [f"{header}: {name}" for name in types((REPOSITORY / header).read_text())
                    if name not in listed and not name.endswith(("Options", "Impl"))]
    assert missing == []


def test_types_are_found_in_a_header():
    assert types("namespace a::b {\nnamespace internal {\nstruct I {};\n}\nclass [[nodiscard]] A final : public B<int> {\n"
                 "  struct Inner {};\n  void f() { g({}); }\n};\nenum class E : int { kOne };\nvoid h(struct B b) {}\n}") == ["A", "E"]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_header_beside_a_name_in_a_table_declares_it(page):
    for names, header in header_rows(page):
        assert any(declares(header, name) for name in names), f"{page.name}: {header} declares none of {names}"


def test_a_header_that_only_mentions_a_class_does_not_declare_it():
    assert declares("lockstep/parallel/ddp/options.h", "MixedPrecision")
    assert not declares("lockstep/parallel/ddp/mixed_precision.h", "Reducer")
    assert not declares("lockstep/train/robust_loop.h", "Trainer")


# ---- Indexes


def test_the_index_of_documents_leads_to_each_page():
    docs = REPOSITORY / "docs"
    text = (docs / "README.md").read_text()
    pages = [*docs.glob("*.md"), *(docs / "internals").glob("*.md")]
    missing = [str(page.relative_to(docs)) for page in pages if f"({page.relative_to(docs)}" not in text]
    assert missing == ["README.md"], "docs/README.md does not name these"


def test_the_index_leads_to_each_entry():
    text = (PAGES / "README.md").read_text()
    for entry in ENTRIES:
        link = re.sub(r"[^\w\- ]", "", entry.heading.lower()).replace(" ", "-")
        assert f"({entry.page.name}#{link})" in text, f"docs/reference/README.md does not name {entry.heading}"


# ---- The reader of C++ itself

HEADER = """
#include <vector>
/// Not a declaration: int no(int);
namespace lockstep {
using Work = std::vector<int>;  // also not: int nor(int);
struct Options {
  std::string text = {};  ///< words
  int number = -1;
};
class [[nodiscard]] Owner {
 public:
  Owner(Owner&& other) noexcept : own_(std::exchange(other.own_, false)) {}
  int rank() const;

 private:
  bool own_ = true;
};
namespace detail {
int hidden(int);
}
Work call(const std::vector<int>& list = {},
          std::optional<int> number = {});
template <class T>
struct Conversion;
template <>
struct Conversion<int> { static int to(int); };
template <class T>
T convert(const T& value) {
  if (value) { return value; }
  return {};
}
inline int convert(char letter) { return letter; }
}  // namespace lockstep
"""


def test_the_reader_finds_what_users_may_call():
    assert by_name(HEADER) == {
        "Work": ["using Work=std::vector<int>"],
        "Options": ["struct Options{std::string text={};int number=-1;}"],
        "Owner": ["class[[nodiscard]]Owner{public:Owner(Owner&&other)noexcept;int rank()const;}"],
        "call": ["Work call(const std::vector<int>&list={},std::optional<int>number={})"],
        "Conversion": ["template<class T>struct Conversion"],
        "convert": ["template<class T>T convert(const T&value)", "int convert(char letter)"],
    }


@pytest.mark.parametrize(
    "before, after",
    [
        ("number = -1", "number = 0"),
        ("rank() const", "rank()"),
        ("list = {}", "list"),
        ("int convert", "long convert"),
        ("Work call", "Work recall"),
        ("const T& value", "T value"),
    ],
)
def test_the_reader_sees_each_change(before, after):
    assert before in HEADER and by_name(HEADER.replace(before, after, 1)) != by_name(HEADER)
