"""The findings of `hpc doctor`, and its checks of the login node. Pure; runs on the login node."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TypeVar

from hpc.base.kernel import RAM_BACKED

_LOCAL_DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay"})
Facts = TypeVar("Facts")


class Severity(StrEnum):
    """The severity of a finding: how much it costs runs."""

    COST = "cost"
    """Runs will lose work or time, or fail."""
    NOTE = "note"
    """Runs may lose work or time in some cases."""
    OK = "ok"


@dataclass(frozen=True)
class Finding:
    """The result of one check in one place."""

    severity: Severity
    value: str
    """The setting or measurement that was seen."""
    cost: str = ""
    what_to_do: str = ""
    check: str = ""
    where: str = ""
    """`cluster`, `login`, a run, or the names of nodes."""
    number: float | None = None
    """The measured number in GB, GB/s, TFLOP/s or seconds; of several places, the lowest. None if there is none."""

    def at(self, check: str, where: str) -> "Finding":
        """Return a copy of the finding with the name of its check and its place."""
        return replace(self, check=check, where=where)


Check = Callable[[Facts], Finding | None]


ok = partial(Finding, Severity.OK)
note = partial(Finding, Severity.NOTE)
costs = partial(Finding, Severity.COST)


def judge(checks: Mapping[str, Check[Facts]], facts: Facts, where: str) -> list[Finding]:
    """Return the finding of each check in a table, except of checks that return None, for lack of facts."""
    return [finding.at(name, where) for name, check in checks.items() if (finding := check(facts))]


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Join findings that differ only in their places and numbers into one for all places. Write numbers into values."""
    alike = dict[Finding, list[Finding]]()
    for finding in findings:
        alike.setdefault(replace(finding, where="", number=None), []).append(finding)
    return [_joined(group) for group in alike.values()]


def _joined(group: Sequence[Finding]) -> Finding:
    numbers = [finding.number for finding in group if finding.number is not None]
    text = "at least " if len(set(map(text_of, numbers))) > 1 else ""
    least = min(numbers, default=None)
    return replace(
        group[0],
        where=" ".join(finding.where for finding in group),
        number=least,
        value=group[0].value if least is None else group[0].value.replace("{number}", text + text_of(least)),
    )


def text_of(number: float) -> str:
    """Return a measured number with three digits."""
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


@dataclass(frozen=True, kw_only=True)
class LoginNode:
    """The login node, on which `hpc doctor` runs."""

    runs_dir: str
    runs_type: str | None
    """Type of the runs directory's file system. None if unknown."""
    nodes_see_runs: bool = False
    """Whether a run has started in the runs directory, or all inspected compute nodes see the directory."""
    bad_nodes: tuple[str, ...] = ()
    """The nodes that have recently failed the user's runs, with the reason."""


def _runs_dir(login: LoginNode) -> Finding | None:
    if login.runs_type is None:
        return None
    value = f"{login.runs_dir} is on {login.runs_type}"
    if login.runs_type in RAM_BACKED:
        share = "use --runs-dir on storage that all nodes share"
        return costs(value, "compute nodes do not see it: no run can start", share)
    if login.nodes_see_runs or login.runs_type not in _LOCAL_DISK:
        return ok(value)
    return note(
        value,
        "this looks like a local disk; unless the nodes mount it, no run can start",
        "check with hpc doctor --nodes 1; use --runs-dir on storage that all nodes share",
    )


def _bad_nodes(login: LoginNode) -> Finding:
    if not login.bad_nodes:
        return ok("no node has failed your runs recently")
    return note(
        f"failed recently: {', '.join(login.bad_nodes)}",
        "new jobs avoid these nodes if enough others are left",
        f"tell the administrators; to use a node again, remove .bad-node.*.NODE.* in {login.runs_dir}",
    )


OF_LOGIN: Mapping[str, Check[LoginNode]] = {"runs directory": _runs_dir, "nodes": _bad_nodes}
