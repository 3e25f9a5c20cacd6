"""An unmodified script on a real Slurm: its steps are counted, its interruptions have a cost."""

import pytest
from support.cluster import TWO_NODES, Site, add_script

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

# As nanoGPT does, it saves its own checkpoint now and then, and continues from it.
TRAIN = """
import os, sys, time
from pathlib import Path
import torch
from torch import distributed

distributed.init_process_group("gloo")
rank, steps, checkpoint = distributed.get_rank(), int(sys.argv[1]), Path("checkpoint.pt")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
distributed.barrier()
while step < steps:
    for _ in range(2):
        model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 20 == 0 and rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "new.pt")
        Path("new.pt").rename(checkpoint)
    time.sleep(0.05)
distributed.destroy_process_group()
"""


def test_steps_of_an_unmodified_script_are_counted(site: Site) -> None:
    add_script(site, "train.py", TRAIN)
    run = site.submit(*TWO_NODES, "--name=counted", "--", "train.py", "300")
    run.wait("steps", lambda: (run.status()["counted_steps"] or 0) >= 45)
    shown = site.hpc("status", "counted").stdout
    assert " steps since the ranks started, " in shown, shown
    done = site.hpc("drill", str(run.directory.path), "worker-kill", "--yes")
    assert done.returncode == 0, done.stderr + run.evidence()
    status = run.wait_for_state("completed")
    [killed] = status["interruptions"]
    assert killed["steps_lost"] is None
    assert killed["steps_lost_at_most"] >= 45
    assert f"\N{LESS-THAN OR EQUAL TO} {killed['steps_lost_at_most']}" in done.stdout, done.stdout
    assert killed["step"] is None, "it must not decide whether the run may go on"
    first, second = run.events("first_step")
    assert first["time"] < killed["failed_at"] < second["time"]
    resumed_at = 300 - status["counted_steps"]
    assert resumed_at % 20 == 0, "the steps of the last start are counted to the end"
    assert 0 < resumed_at <= killed["steps_lost_at_most"]
