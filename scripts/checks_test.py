"""Holds the tree against its own rules: formatting, include directions, shell scripts; and tests the checkers."""

import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(*command):
    result = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return result.returncode, result.stdout


def test_files_are_formatted():
    status, output = run(ROOT / "scripts/check-format")
    assert status == 0, output


def test_includes_follow_the_arrows():
    status, output = run(sys.executable, ROOT / "scripts/check-includes")
    assert status == 0, output


def test_pictures_are_what_the_script_draws(tmp_path):
    status, output = run(ROOT / "scripts/draw-pictures", tmp_path)
    assert status == 0, output
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn and drawn == {name: (ROOT / "docs/images" / name).read_text() for name in drawn}


SCRIPTS = sorted(path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and path.suffix != ".py")


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_all_scripts_say_how_they_are_used(name, option, tmp_path):
    """From whatever folder."""
    done = subprocess.run(
        [ROOT / "scripts" / name, option], cwd=tmp_path, text=True, capture_output=True, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stderr) == (0, "") and "usage: " in done.stdout, done


def test_shell_scripts():
    names = ("scripts/quickstart", "scripts/test", "scripts/bench", "scripts/check-format", "scripts/offline-kit",
             "scripts/oldest-torch", ".ci/run")
    scripts = [ROOT / name for name in names]
    for script in [*scripts, *(ROOT / "scripts/lib").glob("*.sh")]:
        status, output = run("bash", "-n", script)
        assert status == 0, output
    if shutil.which("shellcheck"):
        status, output = run("shellcheck", "-x", "-P", ROOT, *scripts)
        assert status == 0, output


def test_format_check_finds_and_mends(tmp_path):
    shutil.copy(ROOT / ".clang-format", tmp_path)
    file = tmp_path / "bad.cc"
    file.write_text("int  main( ) {return 0 ;}\n")
    status, output = run(ROOT / "scripts/check-format", file)
    assert status == 1 and str(file) in output and "--fix" in output
    status, output = run(ROOT / "scripts/check-format", "--fix", file)
    assert status == 0, output
    assert file.read_text() == "int main() {\n  return 0;\n}\n"
    assert run(ROOT / "scripts/check-format", file)[0] == 0


@pytest.fixture
def tree(tmp_path):
    """Rooms base <- store <- work <- play/ball; returns a function that writes files and gives the checker's answer."""
    rooms = {"base": "", "store": "base PRIVATE shelves", "work": "base store # not top\n", "play/ball": "work TESTS_MAY_INCLUDE base"}

    def check(files=None, **changed_rooms):
        for room, may_include in (rooms | changed_rooms).items():
            folder = tmp_path / "lockstep" / room
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "CMakeLists.txt").write_text(f"lockstep_room({folder.name}\n  MAY_INCLUDE {may_include}\n  SOURCES a.cc)\n")
        for name, text in {"lockstep/base/ok.h": "#include <vector>\n", **(files or {})}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return run(sys.executable, ROOT / "scripts/check-includes", "--root", tmp_path)

    return check


@pytest.mark.parametrize("file, include", [
    ("lockstep/work/a.cc", "<lockstep/base/a.h>"),
    ("lockstep/work/a.cc", "<lockstep/work/a.h>"),
    ("lockstep/work/deep/a.cc", "<lockstep/store/a.h>"),
    ("lockstep/work/a.cc", "<lockstep/work/internal/a.h>"),
    ("lockstep/work/a.cc", '"a.inc"'),
    ("lockstep/work/a.cc", '"deep/../a.inc"'),
    ("lockstep/work/shelves/a.cc", "<lockstep/store/a.h>"),
    ("lockstep/store/a.cc", "<lockstep/store/shelves/a.h>"),
    ("lockstep/play/ball/a.cc", "<lockstep/work/a.h>"),
    ("lockstep/play/ball/a.cc", "<lockstep/play/ball/internal/a.h>"),
    ("lockstep/play/ball/deep/a.cc", '"../a.inc"'),
    ("lockstep/play/ball/a_test.cc", "<lockstep/base/a.h>"),
    ("lockstep/work/a_test.cc", "<lockstep/testing/harness.h>"),
    ("lockstep/work/testing/a.h", "<lockstep/testing/harness.h>"),
    ("lockstep/testing/a.cc", "<lockstep/work/internal/a.h>"),
    ("lockstep/lockstep.h", "<lockstep/work/a.h>"),
    ("cli/a.cc", "<lockstep/lockstep.h>"),
    ("examples/a.cc", "<lockstep/store/a.h>"),
])
def test_allowed_includes(tree, file, include):
    status, output = tree({file: f"// first\n#include {include}\n"})
    assert status == 0, output


@pytest.mark.parametrize("file, include, message", [
    ("lockstep/base/a.h", "<lockstep/store/a.h>", "the room 'base' may include no other room, not 'store'"),
    ("lockstep/store/deep/a.cc", "<lockstep/work/a.h>", "the room 'store' may include base, not 'work'"),
    ("lockstep/store/a_test.cc", "<lockstep/work/a.h>", "not 'work'"),
    ("lockstep/work/a.cc", "<lockstep/store/internal/a.h>", "internal to the room 'store'"),
    ("lockstep/work/a.cc", "<lockstep/store/deep/internal/a.h>", "internal to the room 'store'"),
    ("lockstep/work/a_test.cc", "<lockstep/store/internal/a.h>", "internal to the room 'store'"),
    ("lockstep/work/a.cc", "<lockstep/store/shelves/a.h>", "internal to the room 'store'"),
    ("lockstep/play/ball/a.cc", "<lockstep/base/a.h>", "the room 'play/ball' may include work, not 'base'"),
    ("lockstep/work/a.cc", "<lockstep/play/ball/a.h>", "not 'play/ball'"),
    ("cli/a.cc", "<lockstep/play/ball/internal/a.h>", "internal to the room 'play/ball'"),
    ("lockstep/play/ball/a.cc", '"../bat/a.h"', "leaves lockstep/play/ball"),
    ("lockstep/work/a.cc", "<lockstep/testing/harness.h>", "only *_test.cc, *_fuzz.cc, *_driver.cc and testing/"),
    ("lockstep/work/a.cc", "<lockstep/top/a.h>", "not 'top'"),
    ("lockstep/work/a.cc", "<lockstep/lockstep.h>", "is for users"),
    ("lockstep/work/a.cc", '"../store/a.h"', "leaves lockstep/work"),
    ("lockstep/work/a.cc", '"lockstep/work/a.h"', "write <lockstep/work/a.h>"),
    ("lockstep/unlisted/a.cc", "<lockstep/base/a.h>", "has no CMakeLists.txt"),
    ("cli/a.cc", "<lockstep/store/internal/a.h>", "internal to the room 'store'"),
    ("examples/a.cc", '"../lockstep/store/a.h"', "leaves examples"),
    ("benchmarks/deep/a.cc", "<lockstep/nowhere/a.h>", "there is no room 'nowhere'"),
    ("examples/a.cc", "<lockstep/testing/harness.h>", "only *_test.cc, *_fuzz.cc, *_driver.cc and testing/"),
])
def test_forbidden_includes(tree, file, include, message):
    status, output = tree({file: f"// first\n  #  include {include}\n"})
    assert status == 1
    assert f"{file}:2: " in output and message in output, output


def test_may_include_without_cycles_and_strangers(tree):
    status, output = tree(base="work")
    assert status == 1 and "MAY_INCLUDE has a cycle: base -> work -> base" in output, output
    status, output = tree(base="base")
    assert status == 1 and "cycle: base -> base" in output
    status, output = tree(base="attic")
    assert status == 1 and "names 'attic', and there is no such room" in output
    status, output = tree(base="TESTS_MAY_INCLUDE attic")
    assert status == 1 and "names 'attic', and there is no such room" in output


def test_room_named_like_its_folder(tree, tmp_path):
    tree()
    (tmp_path / "lockstep/work/CMakeLists.txt").write_text("lockstep_room(play\n MAY_INCLUDE base)\n")
    status, output = run(sys.executable, ROOT / "scripts/check-includes", "--root", tmp_path)
    assert status == 1 and "names the room 'play'" in output
