"""The contenders of `benchmarks/recovery`, `storm.py` and `overhead.py`: how each submits the training of `rivals/`.

Every one trains the same network on the same images with the same global batch, on 2 nodes with a rank each, and every
rank asks for a GPU, which the testbed only pretends to have: so a job has its nodes for itself.
"""

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import ROOT, versions
from benchmarks.hpc_commands import hpc
from benchmarks.recovery.rivals import step_log
from hpc.slurm.squeue import QUEUE_FORMAT, SlurmJob, parse_jobs
from training.config.dataset_layout import FASHION_MNIST_DIRECTORY

SCRIPTS = Path(__file__).parent / "rivals"
NODES = 2
CLASSIFIER_TITLE = "built-in classifier"
"""The built-in classifier, which `hpc drill` measures."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained."""

    rivals: Path
    """The rivals' Python."""
    images: int = 10_000
    batch_size: int = 128
    wait: float = 0.4
    epochs: int = 100_000

    @property
    def epoch_steps(self) -> int:
        """Return the steps of an epoch."""
        return self.images // NODES // (self.batch_size // NODES)

    def flags(self, output: Path, data: str = str(FASHION_MNIST_DIRECTORY)) -> list[str]:
        """Return the flags of a training script."""
        return [
            f"--data={data}", f"--output={output}", f"--images={self.images}",
            f"--batch-size={self.batch_size}", f"--wait={self.wait}", f"--epochs={self.epochs}",
        ]  # fmt: skip


@dataclass(kw_only=True)
class Training:
    """One submitted training. `directory` holds all of its files; `job_id` is that of the submission."""

    contender: "Contender"
    directory: Path
    workload: Workload
    job_id: str = ""
    failed_epoch: int = 0
    """The epoch, from 0, of the last failure."""
    failures: int = 0

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

    def is_due(self) -> bool:
        """Return whether this is a time for a failure: in an epoch that had none, and is not the first.

        The failures come after 40, 50 and 60 % of an epoch, by turns. After the same number of steps since the ranks
        have started, they would be the same failure, which ends a run of ours whose script reports no steps.
        """
        epoch, done = divmod(step_log.newest_step(self.log()), self.workload.epoch_steps)
        least = (0.4, 0.5, 0.6)[self.failures % 3]
        return epoch > self.failed_epoch and least <= done / self.workload.epoch_steps < least + 0.15

    def note_failure(self) -> None:
        """Note that a failure is caused now."""
        self.failures += 1
        self.failed_epoch = step_log.newest_step(self.log()) // self.workload.epoch_steps

    def jobs(self) -> list[SlurmJob]:
        """Return its jobs that can still train."""
        # The jobs of a run of ours change, and all of them have its name.
        selection = f"--name={self.name}" if self.contender.is_ours else f"--jobs={self.job_id}"
        # Slurm may have forgotten them.
        return list(parse_jobs(_typed(["squeue", "--noheader", f"--Format={QUEUE_FORMAT}", selection]).stdout).values())

    def cancel(self) -> None:
        """End it for good, as its user would."""
        if self.jobs() and self.contender.is_ours:
            hpc("cancel", str(self.directory))
        elif self.jobs():
            subprocess.run(["scancel", self.job_id], check=True)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to submit it."""

    key: str
    title: str
    submit: Callable[[Training], str]
    """Submits, and returns the id of the job."""
    package: str = "torch"
    """The distribution whose version matters."""
    script: str = "relay_ddp.py"
    """What is run, of ours."""
    is_ours: bool = False
    restarts_in_place: bool = True
    """Whether a killed rank is replaced without a part of Slurm."""
    needs_library: bool = False
    """Whether the script of ours needs the rivals' Python."""
    spares: int = 0
    """Spare nodes, of ours."""

    def start(self, directory: Path, workload: Workload) -> Training:
        """Submit a training whose files are in this directory, which does not exist yet."""
        training = Training(contender=self, directory=directory, workload=workload)
        # The run directory is made by the submission.
        (directory.parent if self.is_ours else directory).mkdir(parents=True, exist_ok=True)
        training.job_id = self.submit(training)
        return training


# --- how each is submitted ---


def _submit_ours(training: Training) -> str:
    script = str((SCRIPTS / training.contender.script).relative_to(ROOT))
    answer = hpc(
        "submit", f"--nodes={NODES}", "--gpus-per-node=1", "--cpus-per-gpu=1", "--mem=4G", "--time=4h",
        f"--data={FASHION_MNIST_DIRECTORY}", "--hang-timeout=10s", f"--runs-dir={training.directory.parent}",
        f"--name={training.name}", f"--spares={training.contender.spares}",
        *([f"--python={training.workload.rivals}"] if training.contender.needs_library else []),
        "--", script, *training.workload.flags(training.output, "{data}"),
    )  # fmt: skip
    return str(answer["job_id"])


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


_HEAD = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
_RENDEZVOUS = (
    f"--nnodes={NODES}", "--nproc-per-node=1", "--rdzv-backend=c10d", '--rdzv-endpoint="$head:29500"',
    '--rdzv-id="$SLURM_JOB_ID"',
)  # fmt: skip


def _submit_ft_launcher(training: Training) -> str:
    launcher = training.workload.rivals.with_name("ft_launcher")
    words: list[str | Path] = [
        launcher, *_RENDEZVOUS, "--max-restarts=100", "--ft-initial-rank-heartbeat-timeout=120",
        "--ft-rank-heartbeat-timeout=10", SCRIPTS / "ft_ddp.py", *training.workload.flags(training.output),
    ]  # fmt: skip
    # NeMo-Run's template for it ends likewise.
    again = ' || scontrol requeue "$SLURM_JOB_ID"'
    return _sbatch(training, f"{_HEAD}srun --cpus-per-task=1 {' '.join(map(str, words))}{again}")


def _submit_torchrun(training: Training) -> str:
    words: list[str | Path] = [
        training.workload.rivals, "-m torch.distributed.run", *_RENDEZVOUS, SCRIPTS / "torchrun_ddp.py",
        *training.workload.flags(training.output),
    ]  # fmt: skip
    return _sbatch(training, f"{_HEAD}srun --cpus-per-task=1 {' '.join(map(str, words))}")


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
        Contender(key="ours", title="script with torchrelay", submit=_submit_ours, is_ours=True),
        Contender(
            key="unchanged", title="unchanged script", submit=_submit_ours, script="torchrun_ddp.py", is_ours=True
        ),
        Contender(key="spare", title="script with torchrelay, spare node", submit=_submit_ours, is_ours=True, spares=1),
        Contender(
            key="callback", title="Lightning with callback", package="lightning", submit=_submit_ours,
            script="lightning_callback_ddp.py", is_ours=True, needs_library=True,
        ),
        Contender(key="plain", title="srun torchrun", submit=_submit_torchrun),
        Contender(key="submitit", title="submitit + torchrun", package="submitit", submit=_submit_submitit),
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
