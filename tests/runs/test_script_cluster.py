"""A user's own script on a real Slurm, submitted by an ordinary user: signals, and variables of Slurm."""

import json
import sys

import pytest
from support.cluster import TWO_NODES, Run, Site, add_script, preempt

from hpc.base.files import read_json_lines

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

# Each rank counts in a file of its own, until it is stopped, and in the next attempt 20 steps more. A signal that it
# handles makes it save, and exit as it was told.
COUNTS = """
import json, os, signal, sys, time
from pathlib import Path

handled, exit_code = sys.argv[1], int(sys.argv[2])
run, rank, told = Path(os.environ["TORCHRELAY_RUN_DIR"]), os.environ["RANK"], []
attempt = int(os.environ["TORCHRELAY_ATTEMPT"])
for name in ("TERM", "USR1", "USR2", "INT", "HUP"):
    signal.signal(getattr(signal, "SIG" + name), signal.SIG_IGN)
signal.signal(getattr(signal, "SIG" + handled), lambda number, _: told.append(number))
saved = run / f"saved-{rank}"
step = begin = int(saved.read_text()) if saved.exists() else 0
(run / "metrics").mkdir(exist_ok=True)
while attempt == 1 or step < begin + 20:
    step += 1
    with open(run / "metrics" / f"rank{rank}.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "attempt": attempt}) + "\\n")
    if told:
        time.sleep(float(rank) * 3)
        saved.write_text(str(step))
        sys.exit(exit_code)
    time.sleep(0.1)
"""


def counted(run: Run, rank: int) -> list[int]:
    return [line["step"] for line in read_json_lines(run.directory.path / "metrics" / f"rank{rank}.jsonl")]


def test_scripts_are_stopped_by_the_signal_that_they_handle(ordinary_user: Site) -> None:
    add_script(ordinary_user, "counts.py", COUNTS)
    two_ranks = ("--nodes=1", "--gpus-per-node=2", "--cpus-per-gpu=1")
    runs = [
        # Exit code 130: as a KeyboardInterrupt does; the other rank takes seconds more to save.
        ordinary_user.submit(*two_ranks, "--stop-signal=INT", "--name=int", "--", "counts.py", "INT", "130"),
        # Slurm sends SIGTERM, and the script knows the time limit's signal alone.
        ordinary_user.submit(*TWO_NODES, "--name=usr", "--", "counts.py", "USR2", "0"),
    ]
    for run in runs:
        run.wait("steps", lambda run=run: min(len(counted(run, 0)), len(counted(run, 1))) >= 5)
        ordinary_user.slurm("scancel", "--signal=TERM", f"{run.job_id}.0")
    for run in runs:
        run.wait_for_next_job()
        status = run.wait_for_state("completed")
        assert [attempt["cause"] for attempt in status["attempts"]] == ["requeued", "completed"]
        for rank in (0, 1):
            steps = counted(run, rank)
            assert steps == list(range(1, len(steps) + 1)), "no step was lost"
        assert not run.events("interruption")


def test_preempted_script_with_start_once_gets_no_other_job(ordinary_user: Site) -> None:
    add_script(ordinary_user, "counts.py", COUNTS)
    run = ordinary_user.submit(*TWO_NODES, "--start-once", "--name=once", "--", "counts.py", "TERM", "0")
    run.wait("steps", lambda: min(len(counted(run, 0)), len(counted(run, 1))) >= 5)
    preempt(run)
    status = run.wait_for_state("failed")
    run.wait("the end of its job", lambda: not run.is_alive())
    assert [attempt["cause"] for attempt in status["attempts"]] == ["preempted"]
    for rank in (0, 1):
        assert int((run.directory.path / f"saved-{rank}").read_text()) == counted(run, rank)[-1], "it could save"
    supervised = ordinary_user.hpc("supervise", "--once")
    assert supervised.returncode == 0, supervised.stderr
    assert not run.is_alive(), "the supervisor does not continue it either"


# As research code does, with Slurm's variables before torchrun's.
ASKS_SLURM = """
import json, os, sys
from pathlib import Path

seen = {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}
Path(sys.argv[1], seen["SLURM_PROCID"]).write_text(json.dumps(seen))
if "RANK" in os.environ:
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", rank=int(seen["SLURM_PROCID"]), world_size=int(seen["SLURM_NTASKS"]))
    ranks = torch.tensor([int(seen["SLURM_PROCID"]), int(seen["SLURM_LOCALID"])])
    dist.all_reduce(ranks)
    assert ranks.tolist() == [6, 2]
"""
# The job and the step have other ids, ports and CPUs, and a task has a process id.
DIFFERS = {
    "CPU_BIND", "CPU_BIND_LIST", "CPU_BIND_TYPE", "CPU_BIND_VERBOSE", "DISTRIBUTION", "JOBID", "JOB_ID", "JOB_NAME",
    "JOB_START_TIME", "JOB_END_TIME", "LAUNCH_NODE_IPADDR", "PRIO_PROCESS", "SRUN_COMM_HOST", "SRUN_COMM_PORT",
    "STEPID", "STEP_ID", "STEP_LAUNCHER_PORT", "TASK_PID", "UMASK",
}  # fmt: skip


def test_ranks_have_the_variables_of_slurm_as_if_srun_had_started_each(ordinary_user: Site) -> None:
    add_script(ordinary_user, "asks.py", ASKS_SLURM)
    size = ("--nodes=2", "--gpus-per-node=2")
    for directory in ("ours", "srun"):
        ordinary_user.type("mkdir", directory)
    run = ordinary_user.submit(*size, "--cpus-per-gpu=1", "--", "asks.py", str(ordinary_user.path / "ours"))
    run.wait_for_state("completed")
    task = [sys.executable, str(ordinary_user.path / "asks.py"), str(ordinary_user.path / "srun")]
    ordinary_user.slurm("srun", *size, "--ntasks-per-node=2", "--cpus-per-task=1", "--mpi=none", *task)
    for rank in map(str, range(4)):
        ours, own = (json.loads((ordinary_user.path / directory / rank).read_text()) for directory in ("ours", "srun"))
        expected = {name: value for name, value in own.items() if name.removeprefix("SLURM_") not in DIFFERS}
        assert {name: ours.get(name) for name in expected} == expected
