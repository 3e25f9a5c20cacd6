"""docs/tutorials/first-run.md: its commands print what stands below them, but for numbers."""

import re
import shlex
from collections.abc import Callable, Iterator

import pytest
from support.cluster import ROOT, Run, Site

from hpc.core.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
PAGE = ROOT / "docs/tutorials/first-run.md"


def blocks() -> Iterator[tuple[list[str], list[str]]]:
    """The commands of each block of bash, and the lines of the output that follows it."""
    found = re.findall(r"```bash\n(.*?)```\n(?:\n```text\n(.*?)```)?", PAGE.read_text(), re.DOTALL)
    return ((commands.splitlines(), text.splitlines()) for commands, text in found)


def masked(line: str) -> str:
    """The words of the line without numbers, and sorted: how large the parts of a duration are decides their order."""
    return " ".join(sorted(re.sub(r"[\d:.,]+", "#", line).split()))


def assert_shown(expected: list[str], printed: str) -> None:
    """Each line that is shown was printed, in this order; `...` are lines that are not shown."""
    lines = iter([masked(line) for line in printed.splitlines()])
    for line in filter(lambda one: one != "...", expected):
        assert masked(line) in lines, f"{line!r} is not in, or not in this order:\n{printed}"


def test_tutorial_prints_what_it_shows(site: Site) -> None:
    run = Run(site, RunDir(site.path / "runs/first"), "")
    # A condition for each command that looks at a state of the run: the page tells the reader to wait.
    waits: dict[int, Callable[[], object]] = {
        2: lambda: run.wait("step 200", lambda: max(run.steps(), default=0) >= 200),
        5: lambda: run.wait_for_state("completed"),
    }
    with site.supervised():
        for number, (commands, expected) in enumerate(blocks()):
            waits.get(number, lambda: None)()
            for command in (shlex.split(one) for one in commands):
                if command[0] == "hpc" and command[1] not in {"supervise", "testbed"}:
                    done = site.hpc(*command[1:], COLUMNS="120")
                    assert done.returncode == 0, done.stderr
                    if expected:
                        assert_shown(expected, done.stdout)
    assert not run.directory.path.exists(), "the last command has removed it"
