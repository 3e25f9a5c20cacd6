"""A coordinator whose run directory is gone, or on storage that answers nothing: a reader waits in the kernel."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster import mounted_volume
from support.events import attempt_ended, claimed, resources_of, write_events
from support.reported_nodes import AttemptMaker
from support.staging_nodes import hanging

from hpc.run.rundir import RunDir
from jobs import node_attempt
from jobs.node_attempt import NodeAttempt


@pytest.mark.timeout(60)
def test_coordinator_goes_on_while_the_storage_hangs(attempt: AttemptMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_attempt, "HANGS_SECONDS", 1e9)  # who waits for an answer never goes on
    cut_off = attempt(resources=resources_of(nodes="1:3"))
    for rank in range(3):
        cut_off.beat(rank, step=12)
    cut_off.poll()
    with hanging(cut_off.node.run.events), monkeypatch.context() as hung:
        hung.setattr(cut_off.node.storage, "finish", lambda: None)
        cut_off.nodes.silent[1] = 6.0
        cut_off.poll(5.0)
        cut_off.poll(3.0)
        assert (cut_off.members, cut_off.nodes.directive.round) == ((0, 2), 2), "the others go on without the lost node"
        for rank in (0, 2):
            cut_off.nodes.report(rank, round=2)
        cut_off.poll(1.0)
        cut_off.fail(2, round=2, started_at=cut_off.clock.now, cause="bad_node")
        cut_off.poll(3.0)
        assert (cut_off.members, cut_off.nodes.directive.round) == ((0,), 3)
    cut_off.node.storage.finish()
    assert {event["cause"] for event in cut_off.events("interruption")} == {"node_failure", "bad_node"}
    assert [event["round"] for event in cut_off.events("rendezvous")] == [2, 3], "what happened is recorded later"
    write_events(cut_off.node.run, attempt_ended(cause="node_failure"), file="attempt-001-end.jsonl")
    cut_off.nodes.report(0, round=3)
    cut_off.poll(5.0)
    cut_off.poll()
    assert cut_off.is_over(), "an answer is used again"


def replace_run(path: Path) -> None:
    shutil.rmtree(path)
    write_events(RunDir(path), claimed(secret="another"), file="attempt-001-node-00.jsonl")


@pytest.mark.parametrize(
    "harm",
    [
        shutil.rmtree,
        lambda path: path.parent.rename(path.parent.with_name("new-name")),
        lambda path: shutil.rmtree(path / "events"),
        replace_run,
    ],
    ids=["deleted", "in a directory that was renamed", "deleted in part", "replaced by another run"],
)
def test_attempt_ends_when_its_run_directory_is_gone(
    attempt: AttemptMaker, tmp_path: Path, node: NodeAttempt, harm: Callable[[Path], object]
) -> None:
    run = RunDir(tmp_path / "runs" / "r")
    run.path.mkdir(parents=True)
    robbed = attempt(of=replace(node, run=run))
    robbed.poll(5.0)
    harm(run.path)
    for _ in range(3):
        robbed.poll(5.0)
    assert not robbed.is_over()
    robbed.poll(5.0)
    assert robbed.is_over()
    assert robbed.coordinator.run_is_gone


def test_storage_that_is_away_is_not_a_deletion(tmp_path: Path, node: NodeAttempt) -> None:
    with mounted_volume(tmp_path / "volume", "size=10m") as volume:
        run = RunDir(volume / "runs" / "r")
        write_events(run, claimed(secret="n"), file="attempt-001-node-00.jsonl")
        away, device = replace(node, run=run), run.path.stat().st_dev
        assert not away.lacks_run(device)
    assert list(volume.iterdir()) == []
    assert not away.lacks_run(device), "the file system is not mounted"
    volume.rmdir()
    assert not away.lacks_run(device), "as an automounter removes its directory"
