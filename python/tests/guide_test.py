"""The guide "Lockstep from Python" (docs/python.md): its program runs as shown there, in all the ways shown there. The Python of
all documents is Python, and what it imports is there."""

import ast
import importlib.util
import pathlib
import re
import textwrap

import processes
import pytest
from ports import free_port

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
GUIDE = REPOSITORY / "docs" / "python.md"
DOCUMENTS = [REPOSITORY / "README.md", REPOSITORY / "python" / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
NEEDED = {"lockstep", "torch"}  # of other packages those that are installed are tried


def blocks(page) -> list:
    text = page.read_text(encoding="utf-8")
    return [textwrap.dedent(found[2]) for found in re.finditer(r"^( *)```python\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)]


PAGES = [page for page in DOCUMENTS if blocks(page)]
BLOCKS = blocks(GUIDE)


@pytest.fixture
def folder(tmp_path):
    """An empty directory with the guide's train.py in it."""
    (tmp_path / "train.py").write_text(BLOCKS[0], encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """What `python train.py` writes, which makes its own two processes."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "train.py").write_text(BLOCKS[0], encoding="utf-8")
    return processes.run_python("train.py", cwd=folder)


def test_the_program_learns(losses):
    epochs = re.findall(r"^epoch (\d+): loss ([0-9.]+)$", losses, re.MULTILINE)
    assert [int(epoch) for epoch, _ in epochs] == [5, 10, 15, 20], losses
    assert float(epochs[0][1]) > 2 * float(epochs[-1][1]), losses
    shown = re.search(r"^    epoch 20: loss ([0-9.]+)$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert float(epochs[-1][1]) == pytest.approx(float(shown[1]), rel=0.2), "the guide shows another training"


def test_torchrun_gives_the_same_numbers(folder, losses):
    command = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port(), "train.py")
    assert processes.run_python(*command, cwd=folder) == losses


@pytest.mark.long
def test_processes_started_by_hand_give_the_same_numbers(folder, losses):
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    assert processes.run_python("train.py", cwd=folder, environment=meeting, processes=2) == losses


def imports(code) -> list:
    """The import statements, but for those of packages that are not there."""
    lines = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            packages = {name.partition(".")[0] for name in names}
            if all(package in NEEDED or importlib.util.find_spec(package) for package in packages):
                lines.append(ast.unparse(node))
    return lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_each_block_is_python(page):
    for block in blocks(page):
        compile(block, page.name, "exec")


def test_what_the_blocks_import_is_there():
    lines = dict.fromkeys(line for page in PAGES for block in blocks(page) for line in imports(block))
    assert "import lockstep" in lines and len(lines) > 10
    processes.run_python("-c", "\n".join(lines))
