"""The C++ of the guides compiles: each snippet of docs/*.md and of README.md, as it stands there.

Programs are whole; what fragments take for granted declares tests/snippets/frame.h. All snippets become one source, whose
lines are the pages', and which is compiled without making anything of it. So it does not test that a program includes all
that it uses.
"""

import json
import os
import pathlib
import re
import shlex
import subprocess
import textwrap

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
FRAME = REPOSITORY / "tests" / "snippets" / "frame.h"
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
# Fragments that are members of a class: their first words.
MEMBERS = ("at::Tensor get(int64_t index) const {", "torch::nn::BatchNorm2d norm{16};")
LITERAL_OR_COMMENT = re.compile(r'//[^\n]*|/\*[\s\S]*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'')


# ---- From a snippet to C++ that compiles alone


def without_ellipses(code: str) -> str:
    """An ellipsis in parentheses becomes a call, another one an empty statement; those in comments and literals stay."""
    code = LITERAL_OR_COMMENT.sub(lambda found: found[0].replace("…", "..."), code)
    return code.replace("(…)", "(unsaid())").replace("…", ";")


def blanked(code: str) -> str:
    """The same with spaces in place of comments and literals, to look for brackets in."""
    return LITERAL_OR_COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), code)


def parts(code: str) -> list:
    """The statements and definitions on the top level, each with what stands in front of it."""
    bare, found, begin, depth = blanked(code), [], 0, 0
    for place, sign in enumerate(bare):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(sign, 0)
        rest = bare[place + 1 :].lstrip()
        goes_on = re.match(r"[;.,()\[+*/<>?=:&|-]|(else|catch|while)\b", rest) and not re.match(r"\[\]|\((loss_of|auto)\b", rest)
        if depth == 0 and (sign == ";" or (sign == "}" and not goes_on)):
            found.append(code[begin : place + 1])
            begin = place + 1
    return [*found, code[begin:]] if code[begin:].strip() else found


def is_definition(part: str) -> bool:
    """Whether it stands outside of functions: a type, a function, an alias."""
    text = blanked(part).strip()
    if re.match(r"(template|struct|class|enum|namespace|using)\b", text):
        return True
    if re.match(r"(if|for|while|switch|do|try|return|auto)\b", text):
        return False
    head, bracket, rest = text.partition("(")
    if not bracket or len(head.split()) < 2 or re.search(r"[=.({]", head):
        return False
    depth, end = 1, 0
    while depth and end < len(rest):
        depth += {"(": 1, ")": -1}.get(rest[end], 0)
        end += 1
    return re.match(r"\s*(const\s*)?(try\s*)?\{", rest[end:]) is not None


def compiled(code: str, line: int, page: pathlib.Path) -> str:
    """A snippet as a namespace: definitions first, then a function of the statements. Lines keep their numbers."""
    code = without_ellipses(code)
    code = re.sub(r"^#include .*$", "", code, flags=re.M)
    name = page.relative_to(REPOSITORY)

    def at(text: str, offset: int) -> str:
        return f'#line {line + offset} "{name}"\n{text}\n'

    if code.strip().startswith(MEMBERS):
        return f"namespace line_{line} {{ struct Members {{\n{at(code, 0)}}}; }}\n"
    if code.strip().startswith("."):
        return f"namespace line_{line} {{ Options options{{\n{at(code, 0)}}}; }}\n"
    if code.strip().startswith("["):
        return f"namespace line_{line} {{ auto function =\n{at(code, 0)}; }}\n"
    definitions, statements, offset = "", "", 0
    for part in parts(code):
        if is_definition(part):
            definitions += at(part, offset)
        else:
            statements += at(part, offset)
        offset += part.count("\n")
    return f"namespace line_{line} {{\n{definitions}int fragment() {{\n{statements}}}\n}}\n"


def snippets(page: pathlib.Path) -> list:
    text = page.read_text()
    return [(textwrap.dedent(found[2]), text[: found.start()].count("\n") + 2)
            for found in re.finditer(r"^( *)```cpp\n([\s\S]*?)^\1```$", text, re.M)]


def source() -> str:
    """All snippets of all guides."""
    blocks = {page: snippets(page) for page in PAGES}
    includes = sorted(set(re.findall(r"^#include .*$", "\n".join(code for all_ in blocks.values() for code, _ in all_), re.M)))
    text = "\n".join([*includes, f'#include "{FRAME}"']) + "\n"
    for page, found in blocks.items():
        for code, line in found:
            text += f"namespace guides::page_{page.stem} {{\n{compiled(code, line, page)}}}\n"
    return text


# ---- The compiler


def compiler() -> list:
    """How the build compiles the tests: its compiler, definitions and folders; no warnings, no precompiled header."""
    build = pathlib.Path(os.environ.get("LOCKSTEP_BUILD_DIR") or REPOSITORY / "build" / "release")
    commands = build / "compile_commands.json"
    if not commands.is_file():
        pytest.skip(f"there is no {commands}")
    entry = next(each for each in json.loads(commands.read_text()) if "reference_examples.dir" in each["command"])
    words = shlex.split(entry["command"])
    program = next(i for i, word in enumerate(words) if re.search(r"(\+\+|clang)[-\d.]*$", word))
    kept, rest = [words[program]], iter(words[program + 1 :])
    for word in rest:
        if word in ("-I", "-isystem"):
            kept += [word, next(rest)]
        elif word.startswith(("-D", "-I", "-std=")):
            kept.append(word)
    return [*kept, "-w", "-fsyntax-only", "-x", "c++"]


def errors_of(text: str, file: pathlib.Path) -> list:
    """The lines with errors that the compiler prints for this source; writes the file."""
    file.write_text(text)
    done = subprocess.run([*compiler(), f"-I{REPOSITORY}", file], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = re.findall(r"^\S+: (?:fatal )?error: .*$", done.stderr, re.M)
    return found if done.returncode == 0 or found else [done.stderr]


@pytest.mark.long
def test_each_snippet_of_the_guides_compiles(tmp_path):
    errors = errors_of(source(), tmp_path / "guides.cc")
    assert not errors, "\n".join(errors[:60])


@pytest.mark.long
def test_a_loss_function_for_another_model_is_one_error_with_the_remedy(tmp_path):
    program = """
        #include <torch/torch.h>
        #include <lockstep/lockstep.h>
        struct Loader : std::vector<lockstep::data::Example> {
          using Batch = lockstep::data::Example;
        };
        void train(torch::nn::Sequential net, Loader loader) {
          lockstep::DistributedDataParallel model(net);
          torch::optim::SGD optimizer(model.parameters(), 0.1);
          auto loss_of = [](torch::nn::Sequential& net, const Loader::Batch& batch) { return net->forward(batch.data).mean(); };
          lockstep::Trainer trainer(model, optimizer, loader, loss_of);
          trainer.train();
        }"""
    errors = errors_of(program, tmp_path / "program.cc")
    assert len(errors) == 1 and "[](auto& model, const auto& batch)" in errors[0], "\n".join(errors)


# ---- How snippets are taken apart


def test_a_program_and_a_fragment_are_told_apart():
    code = "#include <a.h>\nstruct S {\n  int a;\n};\nint main() try {\n  f({1, 2});\n} catch (...) {\n}\n"
    assert [is_definition(part) for part in parts(code.replace("#include <a.h>", ""))] == [True, True]
    code = 'auto f = [] { return 1; };\nfor (;;) {\n  g();\n}\n(h() / 2).run();  // ; not here\ns("a;{");\n'
    assert [part.strip() for part in parts(code)][0] == "auto f = [] { return 1; };"
    assert not any(is_definition(part) for part in parts(code))


def test_ellipses_outside_of_comments_become_code():
    assert without_ellipses('while (…) {\n  …\n}  // …\ns("…");') == 'while (unsaid()) {\n  ;\n}  // ...\ns("...");'


def test_each_guide_with_snippets_has_a_frame():
    frame = FRAME.read_text()
    missing = [page.name for page in PAGES if snippets(page) and f"namespace page_{page.stem} " not in frame]
    assert missing == []
    assert sum(len(snippets(page)) for page in PAGES) > 90
