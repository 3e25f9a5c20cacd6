"""A user's script with the helper on a real Slurm: it is stopped, a rank hangs, or a node is lost; what is restored."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.cluster import TWO_NODES, Run, Site, add_script, dead, preempt, ranks_of

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

# A tutorial's script: data, model, loop. An epoch is 50 steps, which are slow.
TRAIN = """
import os, sys, time
from torchrelay import report, state
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

epochs = int(sys.argv[1])
distributed.init_process_group("gloo")
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(1600, 8, generator=generator)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data, seed=3)
workers = {"num_workers": 1, "multiprocessing_context": sys.argv[2]} if sys.argv[2:] else {}
loader = DataLoader(data, batch_size=16, sampler=sampler, **workers)
torch.manual_seed(2)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
with state(model=model, optimizer=optimizer) as saved:
    for epoch in saved.epochs(epochs):
        sampler.set_epoch(epoch)
        for x, y in saved.batches(loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            report(step=saved.step, epoch=epoch, loss=loss, images_per_second=16 * 2 / 0.05)
            time.sleep(0.05)
if distributed.get_rank() == 0:
    torch.save(model.state_dict(), os.environ["TORCHRELAY_RUN_DIR"] + "/model.pt")
distributed.destroy_process_group()
"""


def submit(site: Site, name: str, epochs: int, *flags: str, words: Sequence[str] = ()) -> Run:
    add_script(site, "train.py", TRAIN)
    return site.submit(*TWO_NODES, f"--name={name}", *flags, "--", "train.py", str(epochs), *words)


def rank_pid(run: Run, rank: int) -> int:
    """The process of a rank: nodes share this machine's processes."""
    [pid] = [pid for pid, number in ranks_of(run).items() if number == rank]
    return pid


def wait_for_snapshot(run: Run, after: int) -> None:
    """Wait until all nodes hold a snapshot of a later step: the first node has the next one, too."""
    run.wait_for_steps(1)
    process = Path(f"/proc/{rank_pid(run, 0)}")
    words = (process / "environ").read_bytes().split(b"\0")
    [snapshots] = [word.decode().partition("=")[2] for word in words if word.startswith(b"TORCHRELAY_SNAPSHOTS=")]

    def later() -> list[Path]:
        return [path for path in Path(f"{process}/root{snapshots}").glob("step-*") if int(path.name[5:]) > after]

    run.wait(f"a snapshot after step {after}", lambda: len(later()) >= 2)


def test_no_step_is_lost_by_a_stop_with_loader_workers(site: Site) -> None:
    """Slurm sends its signals to all processes of the step. A signal that is no stop interrupts nothing."""
    whole = submit(site, "whole", 6)
    whole.wait_for_state("completed")

    run = submit(site, "stopped", 6, words=["fork"])
    run.wait_for_more_steps(1)
    for name in ("USR1", "HUP", "QUIT"):
        site.slurm("scancel", f"--signal={name}", run.job_id)
    run.wait_for_more_steps(1)
    preempt(run)
    run.wait_for_next_job()
    run.wait_for_more_steps(2)
    site.slurm("scancel", "--signal=USR2", f"{run.job_id}.0")
    run.wait_for_next_job()
    run.wait_for_more_steps(3)
    run.cancel()
    resumed = Run(site, run.directory, json.loads(site.hpc("resume", "stopped", "--json").stdout)["job_id"])
    status = resumed.wait_for_state("completed")

    causes = [attempt["cause"] for attempt in status["attempts"]]
    assert causes == ["preempted", "time_limit", "cancelled", "completed"]
    assert [interruption["steps_lost"] for interruption in status["interruptions"]] == [0, 0, 0]
    resumed.assert_no_gap()
    weights, expected = (torch.load(one.directory.path / "model.pt") for one in (resumed, whole))
    assert all(weights[name].equal(expected[name]) for name in expected)


def test_snapshot_restores_a_hung_script_and_becomes_a_checkpoint_when_it_cannot_save(ordinary_user: Site) -> None:
    run = submit(ordinary_user, "hung", 1000, "--hang-timeout=15s", "--grace-period=2s")
    wait_for_snapshot(run, 1)
    os.kill(rank_pid(run, 1), signal.SIGSTOP)
    run.wait("the interruption", lambda: run.events("interruption"))
    [hang] = run.events("interruption")
    assert (hang["cause"], hang["rank"]) == ("hang", 1)
    run.wait("the restored ranks", lambda: len(run.events("train_started")) == 2)
    restored = run.events("train_started")[1]
    assert restored["source"] == "snapshot"

    wait_for_snapshot(run, restored["step"])
    for rank in (0, 1):
        os.kill(rank_pid(run, rank), signal.SIGSTOP)  # it cannot save any more
    ordinary_user.slurm("scancel", "--signal=TERM", f"{run.job_id}.0")
    run.wait_for_next_job()
    [saved] = run.events("snapshot_saved")
    assert saved["step"] > restored["step"]
    run.wait("the second attempt", lambda: len(run.events("train_started")) == 3)
    again = run.events("train_started")[2]
    assert (again["step"], again["source"]) == (saved["step"], "checkpoint")
    run.cancel()


def test_lost_node_costs_the_steps_since_the_snapshot_of_the_other_one(site: Site) -> None:
    run = submit(site, "spare", 1000, "--spares=1")
    run.wait_for_steps(60)
    nodes = run.nodes()
    [first] = {tuple(event["members"]) for event in run.events("rendezvous")}
    lost = nodes[next(rank for rank in first if rank != 0)]
    wait_for_snapshot(run, 1)
    with dead(site, lost):
        run.wait("the restored ranks", lambda: len(run.events("train_started")) == 2)
        run.wait_for_steps(len(run.steps()) + 60)
        [interruption] = run.status()["interruptions"]
        run.cancel()
    assert (interruption["cause"], interruption["node"]) == ("node_failure", lost)
    again = run.events("train_started")[1]
    assert again["source"] == "snapshot"
    assert interruption["steps_lost"] == interruption["step"] - again["step"]
