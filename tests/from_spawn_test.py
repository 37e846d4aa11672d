"""docs/from_spawn_to_several_hosts.md: its program is the one that is compiled here, and its commands run."""

import pathlib
import re

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
PAGE = (REPOSITORY / "docs" / "from_spawn_to_several_hosts.md").read_text()
SOURCE = (REPOSITORY / "tests" / "drivers" / "from_spawn_driver.cc").read_text()
STEPS = re.sub(r"^```[\s\S]*?^```$", "", PAGE, flags=re.M).split("\n## Step ")[1:]


def blocks(language):
    return re.findall(rf"^```{language}\n([\s\S]*?)^```$", PAGE, re.M)


def commands(step):
    """The indented lines of the step."""
    return [line.strip() for line in STEPS[step - 1].splitlines() if line.startswith("    ")]


def test_the_programs_are_those_that_run_here():
    parts = re.split(r"^// ---- Step \d\n", SOURCE, flags=re.M)
    program = re.sub(r"^#include .*\n|^int main.*\n", "", blocks("cpp")[0], flags=re.M)
    for definition in re.split(r"\n(?=void|struct)", program.strip()):
        assert definition.strip() in SOURCE
    for step, (diff, before, after) in enumerate(zip(blocks("diff"), parts[1:], parts[2:], strict=False), 2):
        for line in diff.splitlines():
            mark, text = line[:1], line[1:]
            if mark == "+" and not text.startswith("int main"):
                assert f"\n{text}\n" in after and f"\n{text}\n" not in before, f"step {step}: {text}"
            if mark == "-" and not text.startswith("int main"):
                assert f"\n{text}\n" in before and f"\n{text}\n" not in after, f"step {step}: {text}"
            if mark == " ":
                assert f"\n{text}\n" in before and f"\n{text}\n" in after, f"step {step}: {text}"


class Guide:
    """Runs its commands, with the driver as ./train."""

    def __init__(self, programs):
        self.programs = programs

    def start(self, step, command, inside=(), **variables):
        train = self.programs.folder / "train"
        train.write_text(f'#!/bin/sh\nexec {self.programs.find("from_spawn_driver")} {step}\n')
        train.chmod(0o700)
        names = {"node-a": "host-a", "node-b": "host-b", "lockstep ": f"{self.programs.find('lockstep')} "}
        for name, here in names.items():
            command = command.replace(name, here)
        return self.programs.start(*inside, "sh", "-c", command, **variables)


@pytest.fixture
def guide(programs):
    return Guide(programs)


def check(results):
    for done in results:
        if "needs UCX" in done.stderr or "built without OpenSSL" in done.stderr:
            pytest.skip("there is no UCX, or lockstep was built without OpenSSL")
        assert done.status == 0, done.text
    told = "".join(done.stdout for done in results)
    assert [re.findall(rf"epoch {epoch}: loss", told) for epoch in range(3)] == [[f"epoch {epoch}: loss"] for epoch in range(3)], told


def test_step_1_runs(guide):
    (command,) = commands(1)
    check([guide.start(1, command).finish()])


def test_step_2_runs(guide):
    (command,) = commands(2)
    check([guide.start(2, command).finish()])


def test_step_3_runs_by_a_remote_shell(guide, make_hosts):
    net = make_hosts(2)
    command = next(line for line in commands(3) if " -H " in line).replace(" -H ", f" --rsh {net.remote_shell()} -H ")
    check([guide.start(3, command, net.inside(0)).finish()])


def test_step_3_runs_by_a_line_on_each_host_and_goes_on_from_its_checkpoint(guide, make_hosts):
    net = make_hosts(2)
    secret, line = (line for line in commands(3) if " -H " not in line)
    assert guide.start(3, secret).finish().status == 0
    check([agent.finish() for agent in [guide.start(3, line, net.inside(host)) for host in range(2)]])
    again = [agent.finish() for agent in [guide.start(3, line, net.inside(host)) for host in range(2)]]
    assert [done.status for done in again] == [0, 0] and "epoch" not in again[0].stdout + again[1].stdout, again
