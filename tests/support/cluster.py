"""Shared by the tests on the testbed: a tiny data set, submitting and reading runs, waiting for conditions."""

import csv
import fcntl
import json
import os
import pwd
import re
import secrets
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import jsonschema
import pytest

from hpc.base.files import read_json_lines
from hpc.base.kernel import is_alive
from hpc.run.rundir import RunDir
from hpc.slurm.client import TESTBED_DIRECTORY
from support.events import records_in
from support.forked_hpc import can_fork, run_forked
from support.real_images import real_images
from training.config.dataset_layout import IDX_STEMS

ROOT = Path(__file__).parents[2]
JSON_SCHEMA = json.loads((ROOT / "docs" / "json.schema.json").read_text())
SHARED_DIRECTORIES = Path("/var/tmp")
# Generous: the machine may be busy, and Slurm's own clocks tick in tens of seconds.
TIMEOUT_SECONDS = 150.0
# Two nodes with a rank each, which imports torch at every start, on the few cores that there are.
TWO_NODES = ("--nodes=2", "--gpus-per-node=1", "--cpus-per-gpu=1")
# Many steps with little data: enough to learn something, or only quick.
SMALL_BATCH, TINY_BATCH = ("--batch-size=64",), ("--batch-size=16",)
# Small steps, each of them logged, far more than any test lets happen.
ENDLESS = (*TWO_NODES, *TINY_BATCH, "--epochs=100000", "--log-every=1", "--checkpoint-every=5")
# Long enough to be interrupted, short enough to be trained to the end: 30 steps an epoch.
TEN_EPOCHS = (
    *SMALL_BATCH,
    *("--epochs=10", "--log-every=1", "--gpus-per-node=1", "--cpus-per-gpu=1", "--snapshot-every=5", "--log-samples"),
)
# Interrupted only after the test has seen its steps, because each of its 90 takes longer than to look.
VERY_FEW_EPOCHS = (*TEN_EPOCHS, "--epochs=3")
SLOW_STEPS = {"TORCHRELAY_FAULT": "slow@0:0!"}
# The ranks of two nodes without Slurm: they compute the same with one import of torch.
TWO_RANKS_HERE = ("--cluster=local", "--nodes=1", "--gpus-per-node=2")

# Without Slurm, on one rank: 4 steps an epoch of `tiny_data(..., train=320, test=100)`, each of them saved.
SHORT_LOCAL = (
    *("--cluster=local", "--nodes=1", "--gpus-per-node=1", "--cpus-per-gpu=1", "--data=data", "--batch-size=64"),
    *("--log-every=1", "--checkpoint-every=1", "--val-split=0.2"),
)
SHORT_LOCAL_CONSTANT_LR = (*SHORT_LOCAL, "--lr-scheduler=constant")
# A user's script whose first attempt waits to be interrupted. It imports nothing of torch, so it starts at once.
WAITS_AT_FIRST = """
import os, time
time.sleep(600 if os.environ["TORCHRELAY_ATTEMPT"] == "1" else 0)
"""


@contextmanager
def mounted_volume(path: Path, options: str) -> Iterator[Path]:
    """A file system of its own size, in memory. Skips a test that may not mount one."""
    need("mount")
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(volume: Path) -> Path:
    """Fill a mounted volume. Returns the file to remove to free the space."""
    filler = volume / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], check=False, stderr=subprocess.DEVNULL)
    return filler


def checked_json(
    arguments: Sequence[str], done: "subprocess.CompletedProcess[str]"
) -> "subprocess.CompletedProcess[str]":
    """What a verb has printed; with --json it must have the documented shape, also for an error."""
    if "--json" in arguments and "--follow" not in arguments:
        assert done.stdout, done.stderr
        document = json.loads(done.stdout)
        is_error = isinstance(document, dict) and "error" in document
        verb = "error" if is_error else {"fork": "submit", "evaluate": "submit"}.get(arguments[0], arguments[0])
        jsonschema.validate(document, {**JSON_SCHEMA, "$ref": f"#/$defs/{verb}"})
        assert not is_error or document["exit_code"] == done.returncode
    return done


def hpc(*arguments: str, cwd: Path | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Type `hpc ...`."""
    return checked_json(arguments, run_forked(arguments, cwd or ROOT, {**os.environ, **environment}))


def hpc_json(*arguments: str, cwd: Path | None = None) -> Any:
    """Type `hpc ... --json` and read the answer."""
    done = hpc(*arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


Command = Callable[[str, str], None]
"""Replaces one of Slurm's commands, by its name, by a shell script with a text."""


def need(*programs: str) -> None:
    """Skip a test that cannot run here; where the Slurm tests are required, fail it."""
    missing = [name for name in programs if shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]
    if os.getuid() == 0 and not missing:
        return
    reason = f"needs root and {', '.join(programs)}; missing: {', '.join(missing) or 'root'}"
    if os.environ.get("TORCHRELAY_REQUIRE_SLURM"):
        pytest.fail(reason)
    pytest.skip(reason)


def tiny_data(directory: Path, train: int = 2000, test: int = 500) -> Path:
    """Write a few real images as IDX files."""
    directory.mkdir()
    for part, count in (("train", train), ("test", test)):
        images, labels = real_images(part, count)
        headers = struct.pack(">IIII", 2051, count, 28, 28), struct.pack(">II", 2049, count)
        (directory / IDX_STEMS[f"{part}_images"]).write_bytes(headers[0] + images.tobytes())
        (directory / IDX_STEMS[f"{part}_labels"]).write_bytes(headers[1] + labels.tobytes())
    return directory


@dataclass(frozen=True)
class Site:
    """A directory that all nodes see, from which root or an ordinary user submits."""

    path: Path
    slurm_conf: str
    user: str | None = None

    def type(self, *command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in it."""
        return subprocess.run(
            command, **self._as_the_user(environment), capture_output=True, text=True, check=False, timeout=240
        )

    def _as_the_user(self, environment: dict[str, str]) -> dict[str, Any]:
        account = pwd.getpwnam(self.user) if self.user else None
        own = {"HOME": str(self.path), "USER": self.user, "LOGNAME": self.user} if self.user else {}
        return {
            "cwd": self.path,
            "env": {**os.environ, "SLURM_CONF": self.slurm_conf, **{k: str(v) for k, v in own.items()}, **environment},
            "user": account.pw_uid if account else None,
            "group": account.pw_gid if account else None,
            "extra_groups": [] if account else None,
        }

    @contextmanager
    def supervised(self, *flags: str) -> "Iterator[subprocess.Popen[str]]":
        """Run `hpc supervise` in it in the background."""
        with self.started("supervise", "--interval=1s", *flags) as supervisor:
            yield supervisor

    @contextmanager
    def started(self, *arguments: str, errors: int | None = subprocess.STDOUT) -> "Iterator[subprocess.Popen[str]]":
        """Run `hpc ...` in it in the background."""
        command = [sys.executable, "-m", "hpc", *arguments]
        out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        with subprocess.Popen(command, **self._as_the_user({}), **out) as verb:
            try:
                yield verb
            finally:
                verb.terminate()

    def hpc(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run `hpc ...` in it."""
        own = {**os.environ, "SLURM_CONF": self.slurm_conf, **environment}
        if self.user is None and can_fork(own):
            return checked_json(arguments, run_forked(arguments, self.path, own))
        return checked_json(arguments, self.type(sys.executable, "-m", "hpc", *arguments, **environment))

    def slurm(self, *command: str) -> str:
        """Run one of Slurm's commands, which must succeed."""
        done = self.type(*command)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def end_all_jobs(self) -> None:
        """Cancel the test's remaining jobs, and wait until they have ended."""
        self.slurm("scancel", "--me")
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while self.slurm("squeue", "--me", "--noheader"):
            assert time.monotonic() < deadline, "jobs do not end"
            time.sleep(0.3)

    def submit(self, *arguments: str, **environment: str) -> "Run":
        """Submit a run."""
        done = self.hpc("submit", "--json", *arguments, **environment)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        return Run(self, RunDir(Path(answer["run_dir"])), answer["job_id"])


@dataclass
class Run:
    """A submitted run."""

    site: Site
    directory: RunDir
    job_id: str
    """The job that the test has seen last (`wait_for_next_job`)."""

    def status(self) -> dict[str, Any]:
        """Its entry of `hpc status --json`."""
        done = self.site.hpc("status", str(self.directory.path), "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout)[0])

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Its events of one kind."""
        return [event for event in records_in(self.directory.events) if event["event"] == kind]

    def steps(self) -> list[int]:
        """The steps in its metrics."""
        return [record["step"] for record in read_json_lines(self.directory.train_metrics)]

    def attempts_logged(self) -> list[int]:
        """The attempts of the steps in its metrics, in order."""
        return list(dict.fromkeys(record["attempt"] for record in read_json_lines(self.directory.train_metrics)))

    def queue(self, form: str) -> str:
        """Fields of its job from squeue."""
        return self.site.slurm("squeue", "--noheader", f"--jobs={self.job_id}", f"--format={form}")

    def wait(self, what: str, condition: Callable[[], object], seconds: float = TIMEOUT_SECONDS) -> None:
        """Wait until a condition holds; if it does not, fail with the evidence."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen in {seconds:.0f} s:\n{self.evidence()}"
            time.sleep(0.3)

    def evidence(self) -> str:
        """The queue, the events and the ends of all logs."""
        logs = [path for path in self.directory.logs.rglob("*") if path.is_file()]
        tails = [f"== {path}\n" + path.read_text(errors="replace")[-1500:] for path in sorted(logs)]
        events = [str(event) for event in records_in(self.directory.events) if event["event"] != "checkpoint_saved"]
        return "\n".join([self.site.type("squeue", "--long").stdout, *events, *tails])

    def wait_for_steps(self, count: int) -> None:
        """Wait until the metrics have this many steps."""
        self.wait(f"step {count}", lambda: len(self.steps()) >= count)

    def wait_for_more_steps(self, attempt: int = 1) -> None:
        """Wait until an attempt trains, and has made some steps since now."""
        self.wait(f"attempt {attempt}", lambda: self.attempts_logged()[-1:] == [attempt])
        self.wait_for_steps(len(self.steps()) + 5)

    def nodes(self) -> list[str]:
        """Those of the first attempt."""
        return self.events("claimed")[0]["nodes"]

    def wait_for_state(self, state: str) -> dict[str, Any]:
        """Wait for a state of the contract.

        It is asked for when there are new events, and now and then: asking takes a core for a third of a second, which
        the run may need. What is completed has recorded it.
        """
        asked: tuple[int, float] = (0, 0.0)

        def reached() -> bool:
            nonlocal asked
            if state == "completed" and not any(end["cause"] == state for end in self.events("attempt_ended")):
                return False
            written = sum(path.stat().st_size for path in self.directory.events.glob("*.jsonl"))
            if written == asked[0] and time.monotonic() < asked[1] + 1.5:
                return False
            asked = written, time.monotonic()
            return bool(self.status()["state"] == state)

        self.wait(f"state {state}", reached)
        return self.status()

    def wait_for_next_job(self) -> None:
        """Wait until the run has its next job. If that is a requeue, end Slurm's delay, as the owner of the job may."""

        def requeued() -> bool:
            return self.queue("%T %r") == "PENDING BeginTime"

        def replaced() -> list[str]:
            return [event["job_id"] for event in self.events("resubmitted") if event["old_job_id"] == self.job_id]

        self.wait("the next job", lambda: replaced() or requeued())
        if found := replaced():
            self.job_id = found[0]
            return
        # In the second of the requeue, slurmd would refuse the new start's credential, and the job would fail.
        self.site.slurm("scontrol", "update", f"JobId={self.job_id}", "StartTime=now+2")

    def cancel(self) -> None:
        """Cancel it and wait for its end, so that the next test has all nodes."""
        done = self.site.hpc("cancel", str(self.directory.path))
        assert done.returncode == 0, done.stderr
        self.wait("the end of the job", lambda: not self.is_alive())

    def is_alive(self) -> bool:
        """Whether its job, or with --cluster local its controller, still exists."""
        if self.directory.script.exists():
            return str(self.directory.script) in self.site.slurm("squeue", "--me", "--noheader", "--format=%o")
        return is_alive(self.job_id, self.events("submitted")[0]["started"])

    def assert_no_gap(self) -> None:
        """The metrics have every step once, in order."""
        steps = self.steps()
        assert steps == list(range(1, len(steps) + 1))


def shared_directory() -> Path:
    """A new directory outside /tmp, of which each node of the testbed has its own.

    Its name has no digit: a number in a path may be a job's id, which says that the directory is the job's own. It is
    locked as long as this process lives, so that a later one can tell what an interrupted run has left.
    """
    name = f"torchrelay-test-{''.join(secrets.choice(ascii_lowercase) for _ in range(8))}"
    unlocked = SHARED_DIRECTORIES / f".{name}"
    unlocked.mkdir(mode=0o700)
    fcntl.flock(os.open(unlocked, os.O_RDONLY), fcntl.LOCK_EX)
    return unlocked.rename(SHARED_DIRECTORIES / name)


def remove_left_directories() -> list[Path]:
    """Remove the shared directories whose processes have ended, and return them."""
    removed = []
    for path in SHARED_DIRECTORIES.glob("torchrelay-test-*"):
        with suppress(OSError):  # a live process holds the lock; or the directory is another user's, or gone
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                removed.append(path)
            finally:
                os.close(descriptor)
    return removed


@contextmanager
def site_without_slurm() -> Iterator[Site]:
    """A site of root's with a few images, for `--cluster local`."""
    path = shared_directory()
    try:
        tiny_data(path / "data", train=320, test=100)
        yield Site(path, "/nonexistent")
    finally:
        shutil.rmtree(path)


def submit_and_wait(site: Site, *arguments: str) -> Run:
    """Submit a run and wait for its end, which may be a failure."""
    done = site.hpc("submit", "--json", "--wait", *arguments)
    assert done.stdout, done.stderr
    answer = json.loads(done.stdout)
    return Run(site, RunDir(Path(answer["run_dir"])), answer["job_id"])


def refused(site: Site, *arguments: str, **environment: str) -> str:
    """The one line with which a verb refuses its command line."""
    done = site.hpc(*arguments, **environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stdout + done.stderr
    return done.stderr


def add_script(site: Site, name: str, text: str) -> None:
    """Put a script of the user's into the site, which git tracks."""
    (site.path / name).parent.mkdir(exist_ok=True)
    (site.path / name).write_text(text)
    for command in (("git", "init", "-q"), ("git", "add", name)):
        assert site.type(*command).returncode == 0


@contextmanager
def dead(site: Site, node: str) -> Iterator[None]:
    """A node without power, which is restored afterwards."""
    assert site.hpc("testbed", "kill-node", node).returncode == 0
    try:
        yield
    finally:
        assert site.hpc("testbed", "revive-node", node).returncode == 0


@contextmanager
def slow_link(node: str, rate: str) -> Iterator[None]:
    """Limit what a node of the testbed sends to a rate, such as `100mbit`."""
    tc = ("nsenter", f"--net={TESTBED_DIRECTORY / 'ns' / node}.net", "tc", "qdisc")
    # tbf drops packets larger than the burst, and a veth passes up to 64 kB at once, so the burst holds a few of them.
    limit = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
    subprocess.run([*tc, "add", "dev", "eth0", "root", *limit], check=True)
    try:
        yield
    finally:
        subprocess.run([*tc, "del", "dev", "eth0", "root"], check=True)


def what_slurm_holds(seconds: float = 30.0) -> list[str]:
    """All jobs, and the nodes with allocated GPUs; waits until there are none."""
    slurm_conf = str(TESTBED_DIRECTORY / "slurm.conf")
    ask = (["squeue", "--all", "--noheader"], ["scontrol", "--details", "--oneliner", "show", "node"])
    deadline = time.monotonic() + seconds
    while True:
        jobs, nodes = (
            subprocess.run(
                words, env={**os.environ, "SLURM_CONF": slurm_conf}, capture_output=True, text=True, check=True
            ).stdout.splitlines()
            for words in ask
        )
        # Slurm 24.11 prints no GresUsed of a node without GPUs.
        left = [*jobs, *(node for node in nodes if not re.search(r"GresUsed=gpu:(\w+:)?0|Gres=\(null\)", node))]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.3)


def commands() -> Iterator[tuple[Path, list[bytes]]]:
    """Every process of this machine, with its command line."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            yield process, (process / "cmdline").read_bytes().split(b"\0")


def is_on(process: Path, node: str) -> bool:
    """Whether a process runs on a node of the testbed."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return (process / "ns" / "net").stat().st_ino == (TESTBED_DIRECTORY / "ns" / f"{node}.net").stat().st_ino
    return False


def is_of(run: Run, process: Path) -> bool:
    """Whether a process has the environment of a run's ranks: it is torchrun, a rank, or a wrapper of these."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        variable = f"TORCHRELAY_RUN_DIR={run.directory.path}".encode()
        return variable in (process / "environ").read_bytes().split(b"\0")
    return False


def ranks_of(run: Run) -> dict[int, int]:
    """The rank of each of the run's processes on this machine: they are forks of torchrun, with its environment."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            kind, _, rank = (process / "comm").read_text().partition("-")
            if kind == "rank" and is_of(run, process):
                found[int(process.name)] = int(rank)
    return found


def rank_pids(run: Run, node: str) -> list[int]:
    """The processes of the ranks that run on a node, seen from the testbed's machine."""
    return [pid for pid in ranks_of(run) if is_on(Path(f"/proc/{pid}"), node)]


def parent(pid: int) -> int:
    """The process that started another one: of a rank, its wrapper."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def agent_pids(run: Run, node: str) -> list[int]:
    """The run's agent on a node."""
    path = str(run.directory.path).encode()
    agents = [at for at, words in commands() if words[:2] == [b"jobs.agent", path]]
    return [int(at.name) for at in agents if is_on(at, node)]


def assert_complete(run: Run, status: dict[str, Any], ranks: int, tested: int) -> None:
    """A training on two nodes has come to its end in one attempt, and everything is where it belongs.

    Args:
        run: its directory.
        status: its entry of `hpc status --json`.
        ranks: how many it had.
        tested: the number of test images.
    """
    assert (status["state"], status["world_size"]) == ("completed", ranks)
    [attempt] = status["attempts"]
    assert attempt["cause"] == "completed"
    nodes = attempt["nodes"]
    assert len(set(nodes)) == 2
    directory = run.directory.path
    assert directory.stat().st_mode & 0o777 == 0o700
    assert sorted(event["node"] for event in run.events("staged")) == sorted(nodes)
    logs = sorted(path.name for path in run.directory.attempt_logs(1).glob("*.log"))
    assert logs == [f"rank-0{rank}.log" for rank in range(ranks)]
    with (directory / "final" / "confusion.csv").open() as file:
        counted = sum(int(cell) for row in list(csv.reader(file))[1:] for cell in row[1:])
    assert counted == tested, "every test image once"
    assert run.directory.packages.is_file()


def assert_equal(one: RunDir, other: RunDir) -> None:
    """Two trainings have computed the same, in every bit."""
    from training.verify_resume.compare import compare_runs

    different = [part for part in compare_runs(one, other) if part.difference]
    assert not different


def assert_ended_as(run: Run, undisturbed: Run) -> None:
    """No step is missing, and every bit is as in the other run."""
    undisturbed.wait_for_state("completed")
    run.assert_no_gap()
    assert_equal(undisturbed.directory, run.directory)


def preempt(run: Run, other: Site | None = None) -> None:
    """Have Slurm preempt a run of up to four nodes, for a second; by a job of somebody else, if the user may not."""
    everything = ("--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null")
    (other or run.site).slurm("sbatch", *everything, "--wrap=sleep 1")


def assert_loses_a_node(site: Site, run: Run, attempt: int, place: int = 1) -> list[dict[str, Any]]:
    """A run with steps that are slow loses a node in an attempt, and another job completes it. Returns its attempts.

    Args:
        site: of an administrator.
        run: is training, or about to.
        attempt: counted from 1.
        place: of the node in its job; 0 is the first node.
    """
    run.wait_for_more_steps(attempt)
    with dead(site, run.events("claimed")[-1]["nodes"][place]):
        attempts: list[dict[str, Any]] = run.wait_for_state("completed")["attempts"]
    lost, last = attempts[attempt - 1 :]
    assert (lost["cause"], last["cause"]) == ("node_failure", "completed")
    assert lost["job_id"] != last["job_id"]
    run.assert_no_gap()
    return attempts


def assert_nothing_left(run: Run) -> None:
    """No process of the run, and no file in /dev/shm of any node, is left."""
    path = str(run.directory.path).encode()

    def left() -> list[bytes]:
        found = ((at, b" ".join(words)) for at, words in commands() if int(at.name) != os.getpid())
        return [command for at, command in found if path in command or is_of(run, at)]

    run.wait("the end of all processes", lambda: not left())
    own = 'find /dev/shm -mindepth 1 -maxdepth 1 -user "$(id -u)"'
    look = own + ' -exec find {} -mindepth 1 -printf "$SLURMD_NODENAME: %p\\n" ";"'
    found = run.site.slurm("srun", "--nodes=4", "--ntasks-per-node=1", "sh", "-c", look)
    assert not found
