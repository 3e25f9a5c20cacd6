"""The contenders of `benchmarks/recovery` and `storm.py`: how each submits the training of `rivals/`.

Every one trains the same network on the same images with the same global batch, on 2 nodes with a rank each, and every
rank asks for a GPU, which the testbed only pretends to have: so a job has its nodes for itself. Our own trainer has no
wait in its steps; its rows stand beside the others.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import ROOT, versions
from benchmarks.hpc_commands import hpc
from benchmarks.recovery import step_log
from hpc.base.files import read_json_lines
from hpc.cluster.testbed import lifecycle, nodes
from hpc.run.events.history import History
from hpc.run.events.kinds import FirstStep, TrainStarted
from hpc.run.rundir import RunDir

SCRIPTS = Path(__file__).parent / "rivals"
NODES = 2
# Our own trainer has trained for this long before it fails.
_TRAINED_SECONDS = 12.0
# A job in one of these can still train.
ALIVE = frozenset({"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"})


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained."""

    rivals: Path
    """The rivals' Python."""
    data: Path = Path("/usr/share/datasets/fashion-mnist")
    images: int = 20_000
    batch_size: int = 128
    wait: float = 0.2
    epochs: int = 100_000

    @property
    def epoch_steps(self) -> int:
        """Return the steps of an epoch."""
        return self.images // NODES // (self.batch_size // NODES)

    def flags(self, output: Path, data: str | None = None) -> list[str]:
        """Return the flags of a training script."""
        return [
            f"--data={data or self.data}", f"--output={output}", f"--images={self.images}",
            f"--batch-size={self.batch_size}", f"--wait={self.wait}", f"--epochs={self.epochs}",
        ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """A line of squeue."""

    id: str
    state: str
    head: str
    nodes: tuple[str, ...]


@dataclass(kw_only=True)
class Training:
    """One submitted training. `directory` holds all of its files; `job_id` is that of the submission."""

    contender: "Contender"
    directory: Path
    workload: Workload
    job_id: str = ""

    @property
    def name(self) -> str:
        """The name of the job, or the run."""
        return self.directory.name

    @property
    def output(self) -> Path:
        """The directory of the checkpoints and the step log."""
        return self.directory / "output"

    def log(self) -> list[step_log.Entry]:
        """Return its starts and steps."""
        return step_log.read(self.output / "steps.jsonl")

    def last_rank(self) -> step_log.Entry:
        """Return the process (`pid`) and the node (`host`) of the rank with the highest number."""
        ranks = step_log.ranks(self.log())
        return ranks[max(ranks)]

    def steps_lost(self, recovery: step_log.Recovery) -> int:
        """Return the steps lost by the last interruption, as the step log has them."""
        return recovery.steps_lost

    def is_due(self) -> bool:
        """Return whether this is a time for a failure: the middle of an epoch, but not of the first one."""
        epoch, step = self.workload.epoch_steps, step_log.newest_step(self.log())
        return step > epoch and epoch // 2 <= step % epoch < 2 * epoch // 3

    def jobs(self) -> list[Job]:
        """Return its jobs that squeue still knows, and that can still train."""
        # The jobs of a run of ours change, and all of them have its name.
        selection = f"--name={self.name}" if self.contender.is_ours else f"--jobs={self.job_id}"
        return [job for job in squeue(selection) if job.state in ALIVE]

    def cancel(self) -> None:
        """End it for good, as its user would."""
        jobs = self.jobs()
        if jobs and self.contender.is_ours:
            hpc("cancel", str(self.directory))
        elif jobs:
            # Slurm cancels all components of torchx's heterogeneous jobs, and none alone.
            subprocess.run(["scancel", *{job.id.partition("+")[0] for job in jobs}], check=True)


class OwnTrainer(Training):
    """A run of our trainer: its step log is made from the run's events and metrics."""

    def log(self) -> list[step_log.Entry]:
        """Return its starts and steps."""
        run = RunDir(self.directory)
        starts = [event for event in History.load(run).events if isinstance(event, TrainStarted | FirstStep)]
        events = [{"event": event.kind, "time": event.time, "step": event.step} for event in starts]
        steps = [{**row, "event": "step"} for row in read_json_lines(run.path / "metrics" / "train.jsonl")]
        found: list[step_log.Entry] = []
        number = 0
        for entry in sorted([*events, *steps], key=lambda entry: float(entry["time"])):
            is_start = entry["event"] == "train_started"
            number += is_start
            fields = {"rank": 0, "event": "start"} if is_start else {"event": "step"}
            found.append({"time": entry["time"], "step": entry["step"], "pid": -number, **fields})
        return found

    def last_rank(self) -> step_log.Entry:
        """Return what the newest heartbeat on the nodes says."""
        beats = []
        for name in (name for job in self.jobs() for name in job.nodes):
            for path in memory_of(name).glob("torchrelay-*/**/local-*"):
                beat = json.loads(path.read_text().rstrip("\0 \n") or "{}")
                if beat.get("rank") == NODES - 1:
                    beats.append({"time": beat["time"], "pid": beat["pid"], "host": name})
        return max(beats, key=lambda beat: float(beat["time"]))

    def steps_lost(self, _recovery: step_log.Recovery) -> int:
        """Return what the run's status says: what rank 0 had logged of the last steps may be lost with it."""
        return int(hpc("status", str(self.directory))[0]["interruptions"][-1]["steps_lost"] or 0)

    def is_due(self) -> bool:
        """Return whether it has trained for a while: it saves snapshots, not epochs."""
        log = self.log()
        started = max((entry["time"] for entry in log if entry["event"] == "start"), default=None)
        return started is not None and bool(log) and log[-1]["time"] > started + _TRAINED_SECONDS


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to submit it."""

    key: str
    title: str
    submit: Callable[[Training], str]
    """Submits, and returns the id of the job."""
    package: str = "torch"
    """The distribution whose version matters."""
    kind: type[Training] = Training
    is_ours: bool = False
    restarts_in_place: bool = True
    """Whether a killed rank is replaced without a part of Slurm."""
    spares: int = 0
    """Spare nodes, of ours."""

    def start(self, directory: Path, workload: Workload) -> Training:
        """Submit a training whose files are in this directory, which does not exist yet."""
        training = self.kind(contender=self, directory=directory, workload=workload)
        # The run directory is made by the submission.
        (directory.parent if self.is_ours else directory).mkdir(parents=True, exist_ok=True)
        training.job_id = self.submit(training)
        return training


def memory_of(name: str) -> Path:
    """Return the /dev/shm of a node, as its slurmd sees it; of a dead node a path that does not exist."""
    for pid in nodes.processes(lifecycle.PATHS.node_net(name)):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "slurmd":
                return Path(f"/proc/{pid}/root/dev/shm")
    return Path("/nonexistent")


def squeue(*selection: str) -> list[Job]:
    """Return jobs in all states; none if Slurm has forgotten them."""
    command = ["squeue", "--noheader", "--states=all", "--format=%i|%T|%B|%N", *selection]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = []
    for line in done.stdout.splitlines():
        number, state, head, nodes = line.split("|")
        found.append(Job(id=number, state=state, head=head, nodes=tuple(expanded(nodes))))
    return found


def expanded(nodes: str) -> list[str]:
    """Return the names in Slurm's short form of the testbed's nodes: gpu[01-02,05]."""
    match = re.fullmatch(r"(\D+)\[(.+)\]", nodes)
    if match is None:
        return [nodes] if nodes else []
    found = []
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        width = len(first)
        found += [f"{match[1]}{number:0{width}}" for number in range(int(first), int(last or first) + 1)]
    return found


# --- how each is submitted ---


def _submit_run(training: Training, *flags: str) -> str:
    answer = hpc(
        "submit", f"--nodes={NODES}", "--gpus-per-node=1", "--cpus-per-gpu=1", "--mem=4G", "--time=4h",
        f"--data={training.workload.data}", "--hang-timeout=10s", f"--runs-dir={training.directory.parent}",
        f"--name={training.name}", f"--spares={training.contender.spares}", *flags,
    )  # fmt: skip
    return str(answer["job_id"])


def _submit_ours(training: Training) -> str:
    script = str((SCRIPTS / "relay_ddp.py").relative_to(ROOT))
    return _submit_run(training, "--", script, *training.workload.flags(training.output, "{data}"))


def _submit_trainer(training: Training) -> str:
    return _submit_run(
        training, "--model=small-cnn", f"--batch-size={training.workload.batch_size}", "--epochs=100000", "--lr=0.02",
        "--lr-scheduler=constant", "--log-every=1",
    )  # fmt: skip


def _submit_submitit(training: Training) -> str:
    script = SCRIPTS / "submitit_launch.py"
    command: list[str | Path] = [training.workload.rivals, script, str(NODES), training.directory / "submitit"]
    return _last_word([*command, *training.workload.flags(training.output)])


def _submit_torchx(training: Training) -> str:
    torchx = training.workload.rivals.with_name("torchx")
    done = _typed([
        torchx, "run", "--scheduler=slurm", "--scheduler_args=partition=gpu,time=4:00:00", "dist.ddp", f"-j={NODES}x1",
        "--cpu=1", "--gpu=1", "--memMB=4096", "--max_retries=100", "--env=OMP_NUM_THREADS=1",
        f"--script={SCRIPTS / 'torchrun_ddp.py'}", "--", *training.workload.flags(training.output),
        # It runs `torchrun` from the PATH, and the job's output goes to where it is typed.
    ], cwd=training.directory, PATH=f"{torchx.parent}:{os.environ['PATH']}")  # fmt: skip
    # Where Slurm has no accounting, it fails after the submission, because it asks sacct for the job's state.
    match = re.search(r"^slurm://torchx/(\d+)$", done.stdout, re.MULTILINE)
    if match is None:
        raise SystemExit(f"torchx failed:\n{done.stdout}{done.stderr}")
    return match[1]


_SBATCH = """\
#!/bin/bash
#SBATCH --job-name={name} --partition=gpu --nodes={nodes} --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=1
#SBATCH --mem=4G --time=4:00:00 --requeue --open-mode=append --output={directory}/job.log {more}
export OMP_NUM_THREADS=1
{command}
"""


def _sbatch(training: Training, command: str, more: str = "") -> str:
    script = training.directory / "job.sbatch"
    script.write_text(
        _SBATCH.format(name=training.name, nodes=NODES, directory=training.directory, command=command, more=more)
    )
    return _last_word(["sbatch", "--parsable", script])


def _submit_lightning(training: Training) -> str:
    words: list[str | Path] = [
        training.workload.rivals,
        SCRIPTS / "lightning_ddp.py",
        *training.workload.flags(training.output),
    ]
    return _sbatch(training, f"srun --cpus-per-task=1 {' '.join(map(str, words))}", "--signal=SIGUSR1@90")


def _submit_ft_launcher(training: Training) -> str:
    launcher = training.workload.rivals.with_name("ft_launcher")
    words: list[str | Path] = [
        launcher, f"--nnodes={NODES}", "--nproc-per-node=1", "--rdzv-backend=c10d", '--rdzv-endpoint="$head:29500"',
        '--rdzv-id="$SLURM_JOB_ID"', "--max-restarts=100", "--ft-initial-rank-heartbeat-timeout=120",
        "--ft-rank-heartbeat-timeout=10", SCRIPTS / "ft_ddp.py", *training.workload.flags(training.output),
    ]  # fmt: skip
    head = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
    # NeMo-Run's template for it ends likewise.
    again = ' || scontrol requeue "$SLURM_JOB_ID"'
    return _sbatch(training, f"{head}srun --cpus-per-task=1 {' '.join(map(str, words))}{again}")


def _last_word(command: Sequence[str | Path]) -> str:
    done = _typed(command)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.split()[-1]


def _typed(command: Sequence[str | Path], cwd: Path = ROOT, **environment: str) -> "subprocess.CompletedProcess[str]":
    merged = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=merged, capture_output=True, text=True, check=False)


CONTENDERS = {
    contender.key: contender
    for contender in (
        Contender(key="ours", title="ours", submit=_submit_ours, is_ours=True),
        Contender(key="spare", title="ours, with a spare node", submit=_submit_ours, is_ours=True, spares=1),
        Contender(key="trainer", title="ours, our own trainer", submit=_submit_trainer, kind=OwnTrainer, is_ours=True),
        Contender(key="submitit", title="submitit, torchrun", package="submitit", submit=_submit_submitit),
        Contender(
            key="ft_launcher", title="ft_launcher", package="nvidia-resiliency-ext", submit=_submit_ft_launcher
        ),
        Contender(key="torchx", title="torchx", package="torchx", submit=_submit_torchx, restarts_in_place=False),
        Contender(
            key="lightning", title="Lightning", package="lightning", submit=_submit_lightning, restarts_in_place=False
        ),
    )
}  # fmt: skip


def versions_of(rivals: Path, keys: Sequence[str]) -> dict[str, str]:
    """Return the versions of the contenders' distributions, in the rivals' environment."""
    return versions(rivals, ["torch", *(CONTENDERS[key].package for key in keys)])
