"""Reservations that a run's time limit would run into: when its next job gets a shorter one."""

import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from support.cluster import Command
from support.events import script_spec

from hpc.run.spec import Resources, RunSpec
from hpc.slurm import job_fields
from hpc.slurm.reservations import Reservation, first_obstacle, shorter_limit

NODES = {"gpu01", "gpu02", "gpu03", "gpu04"}


def reservation(name: str, *nodes: str) -> Reservation:
    return Reservation(name=name, start=float(name), nodes=frozenset(nodes))


@pytest.mark.parametrize(
    ("reservations", "needed", "found"),
    [
        ([], 1, None),
        ([reservation("2", *NODES)], 1, "2"),
        ([reservation("2", "gpu01", "gpu02")], 2, None),
        ([reservation("2", "gpu01", "gpu02")], 3, "2"),
        ([reservation("4", "gpu03"), reservation("2", "gpu01", "gpu02")], 2, "4"),
        ([reservation("2", *NODES)], 5, None),
    ],
    ids=["none", "all nodes", "enough are left", "too few are left", "two together", "too few nodes without it"],
)
def test_first_reservation_that_leaves_too_few_nodes(
    reservations: list[Reservation], needed: int, found: str | None
) -> None:
    obstacle = first_obstacle(reservations, NODES, needed)
    assert (obstacle and obstacle.name) == found


@pytest.fixture
def spec(slurm_command: Command) -> RunSpec:
    """A run of one node that may take a day; all nodes are reserved in five hours and a half."""
    at = f"{datetime.fromtimestamp(time.time() + 5.5 * 3600, UTC):%Y-%m-%dT%H:%M:%S}"
    shown = f"ReservationName=works StartTime={at} Nodes=gpu[01-02] Flags=MAINT"
    names = '*hostnames*gpu01) echo gpu01;; *hostnames*) printf "gpu01\\ngpu02\\n";;'
    slurm_command("scontrol", f"case \"$*\" in *reservation*) echo '{shown}';; {names} esac")
    slurm_command("sinfo", "printf 'gpu01|gpu*|idle\\ngpu02|gpu*|idle\\n'")
    return script_spec("a.py", cluster="slurm", resources=Resources(time="1d"))


@pytest.mark.parametrize(
    "changes",
    [{"time": "5h"}, {"time_min": "6h"}, {"sbatch": ("reservation=works",)}, {"nodes": "3"}],
    ids=["it ends before", "it would be too short", "it is the job's own", "the nodes never suffice"],
)
def test_limit_stays(spec: RunSpec, changes: dict[str, object]) -> None:
    assert shorter_limit(replace(spec, resources=replace(spec.resources, **changes))) is None


def test_slurm_that_does_not_answer_changes_nothing(spec: RunSpec, slurm_command: Command) -> None:
    slurm_command("scontrol", "exit 1")
    assert shorter_limit(spec) is None


@pytest.mark.parametrize(("given", "minutes", "lead"), [("auto", 15, 300), ("20m", 20, 120)])
def test_shortest_limit_leaves_time_to_save(spec: RunSpec, given: str, minutes: int, lead: int) -> None:
    shortened = replace(spec, resources=replace(spec.resources, time_min=given))
    assert (shortened.shortest_minutes, shortened.stop_lead_seconds) == (minutes, lead)
    limited = replace(spec, resources=Resources(time="5m", time_min="auto"))
    assert limited.shortest_minutes == 5, "it is not above the limit"


@pytest.mark.parametrize(
    ("limit", "least", "shortened"),
    [("00:10:00", "00:05:00", True), ("01:00:00", "00:05:00", False), ("00:10:00", "N/A", False)],
    ids=["by --time-min", "not shortened", "by scontrol update: a requeue keeps it"],
)
def test_job_whose_limit_was_shortened(limit: str, least: str, *, shortened: bool) -> None:
    assert job_fields.is_shortened({"TimeLimit": limit, "TimeMin": least}, 60) is shortened
