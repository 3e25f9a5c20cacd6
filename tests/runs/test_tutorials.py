"""The commands of docs/tutorials print what stands below them, but for numbers."""

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cluster import ROOT, Run, Site, add_script, site_without_slurm
from support.relay_script import add_relay

from hpc.run.rundir import RunDir
from hpc.slurm.alive import local_jobs

pytestmark = pytest.mark.timeout(600)
TUTORIALS = ROOT / "docs/tutorials"


def blocks() -> Iterator[tuple[list[str], list[str]]]:
    """The commands of each block of bash of the first run, and the lines of the output that follows it."""
    page = (TUTORIALS / "first-run.md").read_text()
    found = re.findall(r"```bash\n(.*?)```\n(?:\n```text\n(.*?)```)?", page, re.DOTALL)
    return ((commands.splitlines(), text.splitlines()) for commands, text in found)


def transcript(page: str) -> list[tuple[str, list[str]]]:
    """The commands behind `$ ` in the first output of a page, and the lines that each prints."""
    [text, *_] = re.findall(r"```text\n\$ (.*?)```", (TUTORIALS / page).read_text(), re.DOTALL)
    return [
        (command, lines)
        for command, *lines in (part.splitlines() for part in re.split(r"^\$ ", text, flags=re.MULTILINE))
    ]


def masked(line: str) -> str:
    """The words of the line without numbers, and sorted: how large the parts of a duration are decides their order."""
    return " ".join(sorted(re.sub(r"[\d:.,]+", "#", line).split()))


def assert_shown(expected: list[str], printed: str) -> None:
    """Each line that is shown was printed, in this order; `...` stands for lines, or the end of one."""
    lines = iter(printed.splitlines())
    for line in filter(lambda one: one != "...", expected):
        start = len(line.split()) - 1 if line.endswith(" ...") else None
        words = masked(" ".join(line.split()[:start]))
        there = any(masked(" ".join(one.split()[:start])) == words for one in lines)
        assert there, f"{line!r} is not in, or not in this order:\n{printed}"


@pytest.mark.slurm
def test_first_run_prints_what_it_shows(site: Site) -> None:
    run = Run(site, RunDir(site.path / "runs/first"), "")
    # A condition for each command that looks at a state of the run: the page tells the reader to wait.
    waits: dict[int, Callable[[], object]] = {
        2: lambda: run.wait("step 200", lambda: max(run.steps(), default=0) >= 200),
        4: lambda: (run.wait("its result", run.directory.final_result.exists, 400), run.wait_for_state("completed")),
    }
    for number, (commands, expected) in enumerate(blocks()):
        waits.get(number, lambda: None)()
        for command in (shlex.split(one) for one in commands):
            if command[0] == "hpc" and command[1] != "testbed":
                done = site.hpc(*command[1:], COLUMNS="120")
                assert done.returncode == 0, done.stderr
                if expected:
                    assert_shown(expected, done.stdout)
    assert not run.directory.path.exists(), "the last command has removed it"


def test_own_script_prints_what_is_shown() -> None:
    [diff, *_] = re.findall(r"```diff\n(.*?)```", (TUTORIALS / "own-script.md").read_text(), re.DOTALL)
    with site_without_slurm() as site:
        add_relay(site)
        add_script(site, "train.py", "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] != "-"))
        run = Run(site, RunDir(site.path / "runs/first"), "")
        waits: dict[str, Callable[[], object]] = {
            "drill": lambda: run.wait_for_steps(10),
            "status": lambda: run.wait_for_more_steps(attempt=2),
        }
        for command, expected in transcript("own-script.md"):
            verb, *words = shlex.split(command)[1:]
            waits.get(verb, lambda: None)()
            done = site.hpc(verb, *words, COLUMNS="160", PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
            assert done.returncode == 0, done.stderr
            assert_shown(expected, done.stdout)
        assert site.hpc("cancel", "first").returncode == 0
        run.wait("the end of the run", lambda: not local_jobs(run.directory))
