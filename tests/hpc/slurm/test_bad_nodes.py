"""What one run learns about a node, and the user's other runs make of it."""

import json
import time
from pathlib import Path

import pytest

from hpc.run.causes import Cause
from hpc.run.events.kinds import AttemptEnded, Event, Interrupted, NodeFailed, NodeReturned
from hpc.run.rundir import RunDir
from hpc.slurm import bad_nodes


def learnt(runs: Path, name: str, *events: Event) -> list[str]:
    """What all runs know after one of them has recorded these events."""
    for each in events:
        bad_nodes.learn(RunDir(runs / name), each)
    return [bad.node for bad in bad_nodes.known(runs)]


def failed(node: str, cause: Cause = Cause.BAD_NODE) -> Event:
    return NodeFailed(node=node, cause=cause)


def test_a_failure_is_known_to_the_other_runs_until_its_run_has_contact_again(tmp_path: Path) -> None:
    assert learnt(tmp_path, "one", failed("gpu01")) == ["gpu01"]
    assert learnt(tmp_path, "two", AttemptEnded(attempt=1, cause="node_failure", node="gpu02")) == ["gpu02", "gpu01"]
    assert learnt(tmp_path, "two", Interrupted(cause="bad_node", node="gpu1")) == ["gpu1", "gpu02", "gpu01"]
    assert learnt(tmp_path, "three", NodeReturned(node="gpu1")) == ["gpu1", "gpu02", "gpu01"], "another run's failure"
    assert learnt(tmp_path, "two", NodeReturned(node="gpu1")) == ["gpu02", "gpu01"]


@pytest.mark.parametrize("cause", [Cause.CRASHED, Cause.LOST, Cause.OUT_OF_MEMORY, Cause.HANG, Cause.DIVERGED])
def test_a_failure_of_the_program_says_nothing_about_its_node(tmp_path: Path, cause: Cause) -> None:
    assert learnt(tmp_path, "one", failed("gpu01", cause), Interrupted(cause=cause, node="gpu01")) == []


def test_a_run_that_fails_on_each_node_is_itself_to_blame(tmp_path: Path) -> None:
    assert learnt(tmp_path, "one", failed("gpu01"), failed("gpu02"), failed("gpu05", Cause.LOST)) == []
    assert {bad.node for bad in bad_nodes.known(tmp_path, "one")} == {"gpu01", "gpu02", "gpu05"}, (
        "it avoids them itself"
    )
    assert learnt(tmp_path, "two", failed("gpu02")) == ["gpu02"]
    lost = [failed(node, Cause.NODE_FAILURE) for node in ("gpu03", "gpu04")]
    assert set(learnt(tmp_path, "three", *lost)) == {"gpu02", "gpu03", "gpu04"}


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "[" * 100_000, '{"cause": "magic"}', '{"cause": "crashed"}', '{"time": "yesterday"}',
        '{"time": null}', '{"node": []}', '{"run": 7}', '{"time": 1}', '{"time": 99999999999}',
    ],
)  # fmt: skip
def test_old_failures_and_damaged_files_do_not_count(tmp_path: Path, text: str) -> None:
    learnt(tmp_path, "one", failed("gpu01"))
    learnt(tmp_path, "two", failed("gpu02"))
    [path] = tmp_path.glob("*gpu02*")
    changes = json.loads(text) if text.startswith('{"') else None
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}) if changes else text)
    assert [bad.node for bad in bad_nodes.known(tmp_path)] == ["gpu01"]
    assert not path.exists() or text != '{"time": 1}', "an old one is removed"


def test_a_dead_node_is_avoided_for_minutes_and_a_bad_one_for_hours(tmp_path: Path) -> None:
    learnt(tmp_path, "one", failed("gpu01"))
    learnt(tmp_path, "two", failed("gpu02", Cause.NODE_FAILURE))
    for path in tmp_path.iterdir():
        path.write_text(json.dumps({**json.loads(path.read_text()), "time": time.time() - 3600}))
    [bad] = bad_nodes.known(tmp_path)
    assert str(bad) == "gpu01 (bad_node in run one, 60 min ago)"
