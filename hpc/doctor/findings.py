"""What `hpc doctor` has to say: a verdict with its cost and what to do, and how tables of checks are applied. Pure.

The tables are `hpc.doctor.slurm_findings` and `hpc.doctor.node_findings`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

Facts = TypeVar("Facts")


class Severity(StrEnum):
    """How much something matters."""

    COST = "cost"
    """Runs will lose work or time to it, or fail."""
    NOTE = "note"
    """It costs something in some cases only."""
    UNKNOWN = "unknown"
    OK = "ok"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one check says."""

    severity: Severity
    value: str
    """What was seen."""
    cost: str = ""
    what_to_do: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding(Verdict):
    """What one check says of one place."""

    check: str
    where: str
    """`cluster`, `login`, a run or the names of nodes."""


Check = Callable[[Facts], Verdict | None]


def ok(value: str) -> Verdict:
    """All is well."""
    return Verdict(severity=Severity.OK, value=value)


def note(value: str, cost: str, what_to_do: str) -> Verdict:
    """It may cost something."""
    return Verdict(severity=Severity.NOTE, value=value, cost=cost, what_to_do=what_to_do)


def costs(value: str, cost: str, what_to_do: str) -> Verdict:
    """It will cost something."""
    return Verdict(severity=Severity.COST, value=value, cost=cost, what_to_do=what_to_do)


_UNKNOWN = Verdict(severity=Severity.UNKNOWN, value="not reported")


def judge(checks: Mapping[str, Check[Facts]], facts: Facts, where: str) -> list[Finding]:
    """Apply a table of checks; what a check cannot tell from these facts is unknown."""
    verdicts = {check: say(facts) or _UNKNOWN for check, say in checks.items()}
    return [Finding(check=check, where=where, **vars(verdict)) for check, verdict in verdicts.items()]


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """What is the same in several places, once."""
    places = dict[Finding, list[str]]()
    for finding in findings:
        places.setdefault(replace(finding, where=""), []).append(finding.where)
    return [replace(finding, where=" ".join(where)) for finding, where in places.items()]
