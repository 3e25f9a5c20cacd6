"""The same job without Slurm: submitit's local executor, one task per pretended node."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from support.attacks import attack
from support.cluster import ENDLESS, SMALL_BATCH, Run, Site, add_script, commands, parent, ranks_of, tiny_data

from hpc.core import ledger
from hpc.core.kernel import process_state
from hpc.core.ledger import EventWriter
from hpc.core.rundir import RunDir
from training.config.packed_index import read_index

pytestmark = pytest.mark.timeout(400)
LOCAL = "--cluster=local"


@pytest.fixture
def site(shared: Path) -> Iterator[Site]:
    tiny_data(shared / "data")
    here = Site(shared, "/nonexistent")
    yield here
    for path in (shared / "runs").glob("[!.]*"):
        run = RunDir(path)
        [submitted] = [event for event in ledger.read(run.events) if event["event"] == "submitted"]
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


def test_two_pretended_nodes_train(site: Site) -> None:
    arguments = ("--data=data", LOCAL, "--nodes=2", "--gpus-per-node=2", *SMALL_BATCH, "--epochs=3")
    done = site.hpc("submit", *arguments, "--wait", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    status = json.loads(done.stdout)["status"]
    assert (status["state"], status["world_size"], status["attempt"]) == ("completed", 4, 1)
    assert status["device"] == "CPU"
    assert status["test_accuracy"] > 0.5
    assert status["steps_lost"] == 0
    hours = status["gpu_hours"]
    assert 0 < hours["productive"] < hours["allocated"] == pytest.approx(4 * status["elapsed_seconds"] / 3600, rel=0.1)
    assert "[c10d]" not in (site.path / "runs" / status["run"] / "logs/attempt-001/rank-00.log").read_text()
    lines = [line for line in json.loads(site.hpc("logs", status["run"], "--json").stdout) if "rank" in line]
    assert lines
    began, ended = status["attempts"][0]["started"], status["attempts"][0]["ended"]
    assert all(began <= line["time"] <= ended for line in lines)


def test_interrupted_run_requeues_itself_and_can_be_cancelled(site: Site) -> None:
    run = site.submit("--data=data", LOCAL, *ENDLESS)
    run.wait_for_steps(20)
    os.kill(int(run.job_id), signal.SIGTERM)
    run.wait("the second attempt", lambda: 2 in run.attempts_logged())
    run.assert_no_gap()
    first, second = run.status()["attempts"]
    assert first["cause"] == "requeued"
    assert second["first_step"] == first["last_step"]
    assert site.hpc("cancel", str(run.directory.path)).returncode == 0
    assert run.status()["state"] == "cancelled"
    run.wait("the end", lambda: not run.is_alive())
    assert len(run.status()["attempts"]) == 2


def test_two_kills_in_an_unlucky_minute_end_nothing(site: Site) -> None:
    """The second one comes as soon as the ranks are back, about where the first one came."""
    run = site.submit("--data=data", LOCAL, *ENDLESS, "--snapshot-every=off", "--checkpoint-every=1000000")
    run.wait_for_steps(200)
    victim, rank = next(iter(ranks_of(run).items()))
    # A rank whose wrapper is killed cannot report itself, and its peer complains of a lost connection.
    os.kill(parent(victim), signal.SIGKILL)
    run.wait("the second start", lambda: len(run.events("first_step")) == 2)
    os.kill(next(iter(ranks_of(run))), signal.SIGKILL)
    run.wait("the third start", lambda: len(run.events("first_step")) == 3)
    first, _ = run.events("interruption")
    assert (first["cause"], first["rank"]) == ("crashed", rank)
    assert first["detail"].endswith("signal SIGKILL: its process wrapper was killed")
    assert run.status()["state"] == "running"
    run.cancel()


def test_suspended_run_does_not_hang(site: Site) -> None:
    """All its processes stop, as when Slurm suspends a job."""
    run = site.submit("--data=data", LOCAL, *ENDLESS, "--hang-timeout=5s")
    run.wait_for_steps(50)
    path = str(run.directory.path).encode()
    pids = [int(at.name) for at, words in commands() if path in b" ".join(words)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            before = len(run.steps())
            time.sleep(8)
    run.wait("new steps", lambda: len(run.steps()) > before + 100)
    assert not run.events("interruption"), run.evidence()
    assert not run.events("node_lost")
    run.cancel()


DEAD_GPU = """
import os, time
if os.environ["RANK"] == "1":
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered\\nFor debugging, consider some advice")
time.sleep(1000)
"""


def test_dead_gpu_marks_its_node_as_bad(site: Site) -> None:
    (site.path / "dead.py").write_text(DEAD_GPU)
    for command in (("git", "init", "-q"), ("git", "add", "dead.py")):
        assert site.type(*command).returncode == 0
    run = site.submit(LOCAL, "--nodes=2", "--gpus-per-node=1", "--name=dead", "--", "dead.py")
    run.wait("the end of the attempt", lambda: run.events("attempt_ended"))
    [ended] = run.events("attempt_ended")[:1]
    assert (ended["cause"], ended["rank"]) == ("bad_node", 1)
    assert "CUDA error: uncorrectable ECC error encountered" in ended["detail"]
    run.cancel()


# torchrun restarts it at once: it must not fail again before the first failure has been judged.
FAILING = """
import os, pathlib, time
starts = pathlib.Path(os.environ["TORCHRELAY_RUN_DIR"], "starts")
with starts.open("a") as file:
    file.write("x")
time.sleep(4)
raise ValueError(f"another message every time: {starts.read_text()}")
"""


def test_run_waits_between_failures_and_a_signal_ends_the_wait(site: Site) -> None:
    (site.path / "failing.py").write_text(FAILING)
    for command in (("git", "init", "-q"), ("git", "add", "failing.py")):
        assert site.type(*command).returncode == 0
    run = site.submit(LOCAL, "--nodes=1", "--gpus-per-node=1", "--name=failing", "--", "failing.py")
    run.wait("the third interruption", lambda: len(run.events("interruption")) == 3)
    assert [event["pause_seconds"] for event in run.events("interruption")] == [0.0, 10.0, 30.0]
    status = run.status()
    assert (status["state"], status["budget"]["used"][0]["failures"]) == ("running", 3)
    shown = site.hpc("status", str(run.directory.path)).stdout
    assert "failures without progress: 3 of 5 (crashed)" in shown
    os.kill(int(run.job_id), signal.SIGTERM)
    run.wait("the end of the attempt", lambda: run.events("attempt_ended"))
    assert run.events("attempt_ended")[0]["cause"] == "requeued"
    rounds = [event["attempt"] for event in run.events("rendezvous")]
    assert rounds.count(1) == 3, "the check, the first one, and that after the first pause"
    run.cancel()


LEAVES = """
import os, subprocess, time
here = os.environ["TORCHRELAY_RUN_DIR"]
left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
with open(f"{here}/left-{os.environ['RANK']}", "w") as file:
    print(left.pid, file=file)
while not os.path.exists(f"{here}/end"):
    time.sleep(0.1)
"""


@pytest.mark.parametrize("cancelled", [False, True])
def test_no_process_of_a_rank_outlives_the_run(site: Site, cancelled: bool) -> None:
    (site.path / "leaves.py").write_text(LEAVES)
    for command in (("git", "init", "-q"), ("git", "add", "leaves.py")):
        assert site.type(*command).returncode == 0
    run = site.submit(LOCAL, "--nodes=2", "--gpus-per-node=1", "--name=leaves", "--grace=3s", "--", "leaves.py")
    notes = [run.directory.path / f"left-{rank}" for rank in range(2)]
    run.wait("the ranks", lambda: all(note.exists() and note.read_text() for note in notes))
    pids = [int(note.read_text()) for note in notes]
    assert all(process_state(pid) for pid in pids)
    if cancelled:
        run.cancel()
    else:
        (run.directory.path / "end").touch()
        run.wait_for_state("completed")
    run.wait("the end", lambda: not run.is_alive())
    assert not any(process_state(pid) for pid in pids)


def test_own_script_with_its_arguments_and_environment(site: Site) -> None:
    (site.path / "src").mkdir()
    (site.path / "src" / "helper.py").write_text("WORD = 'old'\n")
    (site.path / "src" / "my.py").write_text(
        "import os, sys, helper\n"
        "print(helper.WORD, sys.argv[1:], os.environ['WORLD_SIZE'], os.environ['TORCHRELAY_DATA'], flush=True)\n"
    )
    for command in (("git", "init", "-q"), ("git", "add", "src/my.py")):
        assert site.type(*command).returncode == 0
    flags = ("--nodes=2", "--data=data", "--name=own", "--include=src/h*.py")
    run = site.submit(LOCAL, *flags, "--", "src/my.py", "a b", "--x=$HOME")
    (site.path / "src" / "helper.py").write_text("WORD = 'edited after the submission'\n")
    run.wait_for_state("completed")
    for rank in (0, 1):
        word, rest = run.directory.rank_log(1, rank).read_text().splitlines()[-1].split(" ", 1)
        assert word == "old", "the snapshot runs, not the edited file"
        assert rest.startswith("['a b', '--x=$HOME'] 2 /tmp/torchrelay-")


def test_script_in_place_has_the_files_around_it(site: Site) -> None:
    """In no repository, so that there is nothing to copy."""
    (site.path / "src").mkdir()
    (site.path / "helper.py").write_text("WORD = 'from the top'\n")
    (site.path / "src" / "my.py").write_text("import os, helper\nprint(helper.WORD, os.getcwd(), flush=True)\n")
    run = site.submit(LOCAL, "--nodes=1", "--gpus-per-node=1", "--name=own", "--no-snapshot", "--", "src/my.py")
    run.wait_for_state("completed")
    assert run.directory.rank_log(1, 0).read_text().splitlines()[-1] == f"from the top {site.path}"
    assert [path.name for path in run.directory.code.iterdir()] == [".torchrelay"]


def test_script_starts_where_it_was_submitted(site: Site) -> None:
    files = {
        "mingpt/main.py": "import os, sys, model\n"
        "print(open(sys.argv[1]).read(), model.WORD, sys.path[0], os.getcwd(), flush=True)\n",
        "mingpt/model.py": "WORD = 'imported'\n",
        "mingpt/data/input.txt": "read",
    }
    for name, text in files.items():
        add_script(site, name, text)
    here = replace(site, path=site.path / "mingpt")
    flags = (LOCAL, "--nodes=1", "--gpus-per-node=1", "--runs-dir=../runs")
    runs = [
        here.submit(*flags, "--name=script", "--", "main.py", "data/input.txt"),
        here.submit(*flags, "--name=module", "--", "-m", "main", "data/input.txt"),
        here.submit(*flags, "--name=in-place", "--no-snapshot", "--", "main.py", "data/input.txt"),
    ]
    places = [*(run.directory.code / "mingpt" for run in runs[:2]), here.path]
    for run, place in zip(runs, places, strict=True):
        run.wait_for_state("completed")
        assert run.directory.rank_log(1, 0).read_text().splitlines()[-1] == f"read imported {place} {place}"
    shown = here.hpc("submit", *flags, "--name=told", "--wait", "--", "../mingpt/main.py", "data/input.txt").stdout
    assert f"main.py starts in {site.path}/runs/told/code/mingpt\n" in shown


def test_cancelled_run_ends_though_no_signal_reaches_it(site: Site) -> None:
    run = site.submit("--data=data", LOCAL, *ENDLESS)
    run.wait_for_steps(5)
    EventWriter(run.directory.cancellation).append("cancelled", by="me")
    run.wait("the end", lambda: not run.is_alive())
    assert [(event["attempt"], event["cause"]) for event in run.events("attempt_ended")] == [(1, "cancelled")]
    assert run.events("requeued") == []


def test_last_words_of_a_rank_reach_no_terminal(site: Site) -> None:
    (site.path / "my.py").write_text("raise SystemExit('\\x1b]0;owned\\x07\\x1b[2J')\n")
    for command in (("git", "init", "-q"), ("git", "add", "my.py")):
        assert site.type(*command).returncode == 0
    waited = site.hpc("submit", LOCAL, "--name=bad", "--nodes=1", "--gpus-per-node=1", "--wait", "--", "my.py")
    assert waited.returncode == 1
    run = site.path / "runs" / "bad"
    [agent_log] = run.joinpath("logs").glob("*_0_log.out")
    printed = [site.hpc(verb, "bad").stdout for verb in ("status", "logs")]
    for text in (waited.stdout + waited.stderr, agent_log.read_text(), *printed):
        assert r"\x1b]0;owned\x07\x1b[2J" in text
        assert "\x1b" not in text


def test_other_users_do_not_learn_the_secret_of_a_run_nor_disturb_it(site: Site) -> None:
    run = site.submit("--data=data", LOCAL, *ENDLESS)
    run.wait_for_steps(20)
    [claimed] = run.events("claimed")
    if os.getuid() == 0:
        look = ["sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ"]
        seen = subprocess.run(look, user="nobody", capture_output=True, check=False).stdout.decode(errors="replace")
        assert f"--rdzv-id={run.directory.name}-1-1" in seen
        assert claimed["secret"] not in seen
    # The agents', and that of the first torchrun; those of the ranks, which are its forks, are torch's.
    ranks = ranks_of(run)
    of_run = ((process, b" ".join(command)) for process, command in commands() if int(process.name) not in ranks)
    words = b"jobs.agent", b"torchrun_main.py"
    path = os.fsencode(run.directory.path)
    own = [process for process, command in of_run if path in command and any(word in command for word in words)]
    ports = {port for process in own for port in listening_ports(process)}
    assert {claimed["port"], run.events("rendezvous")[0]["port"]} <= ports
    for seed, port in enumerate(ports):
        attack(port, seed, 1000)
    run.wait_for_steps(len(run.steps()) + 20)
    run.assert_no_gap()
    assert len(run.attempts_logged()) == 1
    assert not run.events("interruption")


def test_untracked_script_is_refused(site: Site) -> None:
    (site.path / "my.py").write_text("")
    assert site.type("git", "init", "-q").returncode == 0
    done = site.hpc("submit", LOCAL, "--", "my.py")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "git add my.py" in done.stderr
    assert not (site.path / "runs").exists()


def test_submission_returns_though_the_run_goes_on(site: Site) -> None:
    """A pipe reader must not wait for the run: the controller keeps none of the caller's streams."""
    run = site.submit("--data=data", LOCAL, "--nodes=1", "--gpus-per-node=1", "--epochs=100000", "--log-every=1")
    run.wait_for_steps(1)
    assert run.is_alive()
    followed = site.hpc("logs", run.directory.name, "--rank=0")
    # Where no DNS answers, a warning of torch's comes first.
    assert any(line.startswith("[1:0") and "] starting" in line for line in followed.stdout.splitlines())
    run.cancel()


def test_images_are_packed_on_the_node_once(site: Site) -> None:
    for number in range(24):
        directory = site.path / "photos" / f"class-{number % 2}"
        directory.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((48, 40), 60).save(directory / f"{number}.jpg")
    (site.path / "disk").mkdir()
    flags = ("--nodes=1", "--gpus-per-node=1", "--batch-size=8", "--image-size=28", "--stage-dir=disk")
    packed = []
    for name in ("first", "second"):
        done = site.hpc(
            "submit", LOCAL, "--data=photos", "--pack=auto", "--epochs=3", f"--name={name}", *flags, "--wait"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        [event] = [e for e in ledger.read(site.path / "runs" / name / "events") if e["event"] == "packed"]
        packed.append(event)
    assert packed[0]["path"] == packed[1]["path"]
    index = read_index(Path(packed[0]["path"]))
    assert (index.size, sum(part.images for part in index.parts)) == (32, 24)
    copies = json.loads(site.hpc("stage", "--list", "--stage-dir=disk", "--json").stdout)
    assert sorted(copy["files"] for copy in copies) == [3 + 1, 24], "the photographs, and what they were packed into"
    check = site.hpc("stage", "--verify", "--stage-dir=disk")
    assert check.returncode == 0, check.stdout
    few = site.hpc("submit", LOCAL, "--data=photos", "--pack=auto", "--epochs=2", "--dry-run", *flags)
    assert few.returncode == 0, few.stderr
    other = site.hpc("submit", LOCAL, "--data=data", "--pack=on", "--dry-run", *flags)
    assert (other.returncode, "is no image folder" in other.stderr) == (2, True)
