"""The same job without Slurm: submitit's local executor, one task per pretended node."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.attacks import attack
from support.cluster import ENDLESS, Run, Site, add_script, commands, refused, tiny_data
from support.events import records_in

from hpc.run.events.kinds import Cancelled
from hpc.run.events.ledger import EventWriter
from hpc.run.rundir import RunDir

pytestmark = pytest.mark.timeout(400)
LOCAL = "--cluster=local"


@pytest.fixture
def site(shared: Path) -> Iterator[Site]:
    tiny_data(shared / "data")
    here = Site(shared, "/nonexistent")
    yield here
    for path in (shared / "runs").glob("[!.]*"):
        run = RunDir(path)
        *_, submitted = [event for event in records_in(run.events) if event["event"] == "submitted"]
        Run(here, run, submitted["job_id"]).cancel()


def listening_ports(process: Path) -> set[int]:
    """The TCP ports at which a process listens."""
    sockets = set[str]()
    for path in (process / "fd").iterdir():
        with suppress(OSError):
            sockets.add(str(path.readlink()))
    tables = ((process / "net" / name).read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    rows = (line.split() for table in tables for line in table)
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


@pytest.mark.slow
def test_submission_returns_and_the_run_requeues_itself_until_it_is_cancelled(site: Site) -> None:
    """A pipe reader must not wait for the run: the controller keeps none of the caller's streams."""
    run = site.submit("--data=data", LOCAL, *ENDLESS, "--nodes=1")
    run.wait_for_steps(20)
    assert "has no job: it runs on this machine" in refused(site, "shell", run.directory.name)
    followed = site.hpc("logs", run.directory.name, "--rank=0")
    # Where no DNS answers, a warning of torch's comes first.
    assert any(line.startswith("[1:0") and "] starting" in line for line in followed.stdout.splitlines())
    os.kill(int(run.job_id), signal.SIGTERM)
    run.wait("the second attempt", lambda: 2 in run.attempts_logged())
    run.assert_no_gap()
    first, second = run.status()["attempts"]
    assert first["cause"] == "requeued"
    assert second["first_step"] == first["last_step"]
    # No signal reaches the run.
    EventWriter(run.directory.cancellation).append(Cancelled())
    run.wait("the end", lambda: not run.is_alive())
    ended = run.events("attempt_ended")
    assert [event["cause"] for event in ended] == ["requeued", "cancelled"]
    assert run.events("checkpoint_saved")[-1]["step"] == ended[-1]["step"], "the ranks have saved and stopped"
    assert len(run.events("requeued")) == 1
    assert run.status()["state"] == "cancelled"


# Rank 1 leaves; the others wait for it in a collective.
LEAVES_EARLY = """
import os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if os.environ["RANK"] == "1":
    sys.exit(0)
dist.barrier()
"""


def test_rank_that_left_and_rank_that_failed_for_it_are_named_after_two_tries(site: Site) -> None:
    add_script(site, "leaves.py", LEAVES_EARLY)
    flags = (LOCAL, "--nodes=2", "--gpus-per-node=0", "--name=early", "--wait", "--json")
    done = site.hpc("submit", *flags, "--", "leaves.py")
    assert done.returncode == 1
    [status] = json.loads(site.hpc("status", "early", "--json").stdout)
    [first] = status["interruptions"]
    assert [attempt["cause"] for attempt in status["attempts"]] == ["crashed"]
    for text in (first["detail"], status["detail"]):
        failed = re.match(r"rank (\d) on localhost failed while it waited for rank 1, which had ended with exit", text)
        assert failed, text
        assert failed[1] in {"0", "2"}
    assert any("the same failure twice" in line for line in status["budget"])


READS_AND_WRITES = """
import os, pathlib, sys
last, given = pathlib.Path("checkpoints/last.txt"), open("../data/given.txt").read()
print("start at", last.read_text() if last.exists() else 0, flush=True)
last.parent.mkdir(exist_ok=True)
last.write_text("50")
pathlib.Path("../data/through.txt").write_text(given)
pathlib.Path(sys.argv[1], "late.txt").write_text("")
open("late.txt")
"""


def test_script_has_the_files_around_it_and_the_run_keeps_what_it_writes(site: Site) -> None:
    project = replace(site, path=site.path / "home/project")
    for name, text in {"project/train.py": READS_AND_WRITES, "data/given.txt": "given"}.items():
        (site.path / "home" / name).parent.mkdir(parents=True)
        (site.path / "home" / name).write_text(text)
    flags, words = ("--runs-dir=../../runs", "--wait", "--json"), ("train.py", str(project.path))
    done = project.hpc("submit", LOCAL, "--nodes=1", "--gpus-per-node=1", "--name=own", *flags, "--", *words)
    failed, run = json.loads(done.stdout)["status"], RunDir(site.path / "runs/own")
    assert [attempt["cause"] for attempt in failed["attempts"]] == ["crashed"]
    assert f"{project.path}/late.txt exists, but not in the run's code" in failed["detail"]
    assert failed["traceback"][0] == "Traceback (most recent call last):"
    assert failed["traceback"][-1] == "FileNotFoundError: [Errno 2] No such file or directory: 'late.txt'"
    assert "\nFileNotFoundError: " in project.hpc("status", "own", "--runs-dir=../../runs").stdout
    assert failed["written"] == [{"path": f"{run.code}/project/checkpoints/", "files": 1}]
    (project.path / "train.py").write_text(READS_AND_WRITES + "print('corrected')\n")
    done = project.hpc("resume", "own", "--new-code", *flags)
    assert json.loads(done.stdout)["status"]["state"] == "completed", done.stdout + done.stderr
    starts = [log.read_text().splitlines() for log in sorted(run.logs.glob("attempt-*/rank-00.log"))]
    began = [line for lines in starts for line in lines if "start at" in line]
    # torchrun may have restarted the ranks a last time before the agents knew that the failure repeats itself.
    assert (began[0], set(began[1:])) == ("start at 0", {"start at 50"})
    assert starts[-1][-1] == "corrected"
    assert project.hpc("clean", "own", "--runs-dir=../../runs", "--yes").returncode == 0
    assert not run.path.exists()
    assert (site.path / "home/data/through.txt").read_text() == "given"


COUNTS_STARTS = """
import os, pathlib, signal
starts = pathlib.Path("starts")
starts.write_text((starts.read_text() if starts.exists() else "") + "started ")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_script_with_start_once_starts_only_once_until_it_is_resumed(site: Site) -> None:
    add_script(site, "once.py", COUNTS_STARTS)
    where = (LOCAL, "--nodes=1", "--gpus-per-node=1")
    assert "leave one out" in refused(site, "submit", *where, "--start-once", "--elastic", "--", "once.py")
    run = site.submit(*where, "--name=once", "--start-once", "--", "once.py")
    run.wait_for_state("failed")
    starts = run.directory.code / "starts"
    assert starts.read_text().split() == ["started"]
    run.wait("the end", lambda: not run.is_alive())
    assert site.hpc("resume", "once").returncode == 0
    run.wait("the second start", lambda: starts.read_text().split() == ["started"] * 2)


def test_last_words_of_a_rank_are_recorded_and_reach_no_terminal(site: Site) -> None:
    add_script(site, "my.py", "raise ValueError(f'{chr(27)}]0;owned{chr(7)}{chr(27)}[2J')\n")
    waited = site.hpc("submit", LOCAL, "--name=bad", "--nodes=1", "--gpus-per-node=1", "--wait", "--", "my.py")
    assert waited.returncode == 1
    run = RunDir(site.path / "runs" / "bad")
    [ended] = [event for event in records_in(run.events) if event["event"] == "attempt_ended"]
    assert (ended["cause"], ended["rank"]) == ("crashed", 0)
    assert ended["detail"].endswith("ValueError: \x1b]0;owned\x07\x1b[2J")
    [agent_log] = run.logs.glob("*_0_log.out")
    printed = [site.hpc(verb, "bad").stdout for verb in ("status", "logs")]
    for text in (waited.stdout + waited.stderr, agent_log.read_text(), *printed):
        assert r"\x1b]0;owned\x07\x1b[2J" in text
        assert "\x1b" not in text


@pytest.mark.slow
def test_other_users_do_not_learn_the_secret_of_a_run_nor_disturb_it(site: Site) -> None:
    run = site.submit("--data=data", LOCAL, *ENDLESS)
    run.wait_for_steps(20)
    [claimed] = run.events("claimed")
    if os.getuid() == 0:
        look = ["sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ"]
        seen = subprocess.run(look, user="nobody", capture_output=True, check=False).stdout.decode(errors="replace")
        assert f"[rank 0/2 of {run.directory.name}]" in seen
        assert claimed["secret"] not in seen
    # The agents', and that of the first torchrun; those of the ranks are torch's.
    name = os.fsencode(run.directory.name)
    named = ((process, b" ".join(command)) for process, command in commands())
    own = [process for process, command in named if re.match(rb"(jobs.agent|torchrun) .*" + name, command)]
    ports = {port for process in own for port in listening_ports(process)}
    assert {claimed["port"], run.events("rendezvous")[0]["port"]} <= ports
    for seed, port in enumerate(ports):
        attack(port, seed, 1000)
    run.wait_for_steps(len(run.steps()) + 20)
    run.assert_no_gap()
    assert len(run.attempts_logged()) == 1
    assert not run.events("interruption")
