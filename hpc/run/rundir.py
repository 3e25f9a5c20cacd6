"""Defines all file names of a run directory, and checks the names of runs. Runs everywhere."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc.base.errors import UserError
from hpc.base.files import refresh_nfs_cache

# Files in `final/`.
CONFUSION, CLASSES = "confusion.csv", "classes.csv"
# Files in `final/` and `best/`.
MODEL_WEIGHTS, MODEL_CARD = "model.safetensors", "model.json"
LIBRARY = "training/relay"
"""The directory of `torchrelay` in a checkout and in the packages of a run; the ranks of all scripts search it."""
_LONGEST_NAME = 100


@dataclass(frozen=True)
class SubPath:
    """A descriptor that returns the path with this name in the directory `path` of its owner."""

    name: str

    def __get__(self, owner: Any, _: type) -> Path:
        return Path(owner.path, self.name)


@dataclass(frozen=True)
class RunDir:
    """The files of one run, by name. Creates none of them."""

    path: Path

    spec = SubPath("spec.json")
    """The resolved RunSpec of the submission, which never changes. After `hpc resume`, another file is in force
    (`current_spec` in hpc.run.events.resumption)."""
    script = SubPath("submit.sbatch")
    """The sbatch script; submitting it by hand starts or resumes the run."""
    environment = SubPath("environment.json")
    """The environment variables at submission, for the run's later jobs."""
    code = SubPath("code")
    """The image of the user's directory in which the run executes: copies of the code, and links to all else."""
    previous_code = SubPath("code-previous")
    """The old `code/` while `hpc resume --new-code` replaces it."""
    packages = SubPath("code/.torchrelay/packages.zip")
    """The archive of our packages that the run executes."""
    package_checksums = SubPath("code/.torchrelay/SHA256SUMS")
    """The checksum of this archive, as `sha256sum --check` reads it."""
    revision = SubPath("code/.torchrelay/revision")
    """The git revision of the user's code; absent if the code was not in a repository."""
    events = SubPath("events")
    """The directory of the events, with one file of JSON lines per writer."""
    cancellation = SubPath("events/cancel.jsonl")
    """The file of the events of `hpc cancel`."""
    alive = SubPath("alive")
    """A file whose modification time is the newest heartbeat of the first node's agent."""
    train_metrics = SubPath("metrics/train.jsonl")
    """One JSON line per logged step."""
    counted_steps = SubPath("metrics/counted.json")
    """How many optimizer steps a script that reports none has done since its ranks last started."""
    newest_snapshot = SubPath("metrics/snapshot.json")
    """Step, time and memory of the newest snapshot, as rank 0 records it every few seconds."""
    eval_metrics = SubPath("metrics/eval.jsonl")
    """One JSON line per evaluation."""
    tensorboard = SubPath("tensorboard")
    tracking = SubPath("tracking")
    """The files of a tracker that cannot reach its server."""
    checkpoints = SubPath("checkpoints")
    """Durable checkpoints, one directory per step, visible only when complete."""
    index = SubPath("index.npz")
    """The list of the files of an image folder, so that later attempts need not list them again."""
    compiled = SubPath("compiled")
    """The code that torch.compile has made: a directory for each software and hardware."""
    diverged = SubPath("diverged.json")
    """The first step whose loss is not finite, and the images of that step."""
    model = SubPath("model")
    """The model that an evaluation evaluates."""
    best = SubPath("best")
    """The model with the best validation metric."""
    final = SubPath("final")
    """The final model and its test result: the run is complete when this exists."""
    final_result = SubPath("final/result.json")
    final_model = SubPath(f"final/{MODEL_WEIGHTS}")
    confusion = SubPath(f"final/{CONFUSION}")
    logs = SubPath("logs")
    """The output of all attempts."""
    report = SubPath("report/index.html")

    @property
    def name(self) -> str:
        """The name of the run and of its directory."""
        return self.path.name

    def revised_spec(self, resumption: int) -> Path:
        """Return the file of the resolved RunSpec that one `hpc resume` puts into force. It never changes."""
        return self.path / f"spec-{resumption:03d}.json"

    def earlier_final(self, resumption: int) -> Path:
        """Return the directory to which an `hpc resume` that trains the run longer moves the earlier `final/`."""
        return self.path / f"final-{resumption:03d}"

    def replaced_files(self, resumption: int) -> Path:
        """Return the directory of the files of the run that gave way to the new code of one `hpc resume`."""
        return self.path / f"code-replaced-{resumption:03d}"

    def sample_log(self, attempt: int, rank: int) -> Path:
        """Return the file with one JSON line per step: the indices of the images that one rank of one attempt used."""
        return self.path / "metrics" / "samples" / f"attempt-{attempt:03d}-rank-{rank:02d}.jsonl"

    def attempt_logs(self, attempt: int) -> Path:
        """Return the directory of the output of one attempt."""
        return self.logs / f"attempt-{attempt:03d}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        """Return the file of the output of one rank of one attempt."""
        return self.attempt_logs(attempt) / f"rank-{rank:02d}.log"

    def refresh_result(self) -> None:
        """Make a result that another host has just written visible on this host (`refresh_nfs_cache`)."""
        for directory in (self.path, self.final):
            if directory.exists():
                refresh_nfs_cache(directory)


def check_run_name(name: str) -> None:
    """Raise UserError if a run directory cannot have this name, or if Slurm would change the name."""
    is_good = name.isprintable() and 0 < len(name) <= _LONGEST_NAME and name == name.strip() and name[0] not in "-."
    # Slurm replaces % and \ in file names.
    if not is_good or any(part in name for part in ("/", "..", "%", "\\")):
        similar = re.sub(r"[^A-Za-z0-9._-]+|\.\.+", "-", name).strip("-.")[:_LONGEST_NAME] or "my-run"
        raise UserError(
            f"--name is {name!r}: use 1 to {_LONGEST_NAME} printable characters, not / \\ % and .., with no - or . "
            f"at the beginning and no space at either end. Try --name {similar}"
        )
