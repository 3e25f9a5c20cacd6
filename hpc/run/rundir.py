"""The run directory: every file name of a run, once. Runs everywhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

# In `final/`.
CONFUSION, SAMPLES, CLASSES, HISTORY = "confusion.csv", "samples.json", "classes.csv", "history.csv"
# In `best/` too.
MODEL_WEIGHTS, MODEL_CARD = "model.safetensors", "model.json"
# In a checkpoint of our trainer.
STATE_TENSORS, STATE_VALUES = "state.safetensors", "state.json"


@dataclass(frozen=True)
class SubPath:
    """A descriptor: this name below the `path` of its owner."""

    name: str

    def __get__(self, owner: Any, _: type) -> Path:
        return Path(owner.path, self.name)


@dataclass(frozen=True)
class RunDir:
    """The files of one run, by name. Creates none."""

    path: Path

    spec = SubPath("spec.json")
    """The resolved RunSpec of the submission, immutable; `current_spec` (hpc.run.events.resumption) is in force."""
    script = SubPath("submit.sbatch")
    """The sbatch script; submitting it by hand starts or resumes the run."""
    environment = SubPath("environment.json")
    """The environment variables at submission, for the run's later jobs."""
    code = SubPath("code")
    """The copy of the code that the run executes."""
    packages = SubPath("code/.torchrelay")
    """Our three packages in that copy."""
    revision = SubPath("code/.torchrelay/revision")
    """The git revision of the code; absent if it was in no repository."""
    events = SubPath("events")
    """What happened: one file of JSON lines per writer."""
    cancellation = SubPath("events/cancel.jsonl")
    """The file of the events of `hpc cancel`."""
    alive = SubPath("alive")
    """Its modification time is the newest heartbeat of the head node's agent."""
    train_metrics = SubPath("metrics/train.jsonl")
    """One JSON line per logged step."""
    eval_metrics = SubPath("metrics/eval.jsonl")
    """One JSON line per evaluation."""
    tensorboard = SubPath("tensorboard")
    """TensorBoard's event files."""
    checkpoints = SubPath("checkpoints")
    """Durable checkpoints, one directory per step, visible only when complete."""
    index = SubPath("index.npz")
    """The list of the files of an image folder, so that later attempts need not list them again."""
    diverged = SubPath("diverged.json")
    """The first step whose loss is not finite, and its images."""
    model = SubPath("model")
    """Of an evaluation: the model that it evaluates."""
    best = SubPath("best")
    """The model with the best validation metric."""
    final = SubPath("final")
    """The final model and its test result: the run is complete when this exists."""
    final_result = SubPath("final/result.json")
    """The test result."""
    confusion = SubPath(f"final/{CONFUSION}")
    """The confusion matrix of the test."""
    samples = SubPath(f"final/{SAMPLES}")
    """Some test images with their predictions."""
    logs = SubPath("logs")
    """All output."""
    report = SubPath("report/index.html")
    """The report page."""

    @property
    def name(self) -> str:
        """The run's name is its directory's."""
        return self.path.name

    def revised_spec(self, resumption: int) -> Path:
        """The resolved RunSpec from one `hpc resume` on, immutable too."""
        return self.path / f"spec-{resumption:03d}.json"

    def earlier_final(self, resumption: int) -> Path:
        """The `final/` of a complete run that one `hpc resume` had train longer."""
        return self.path / f"final-{resumption:03d}"

    def sample_log(self, attempt: int, rank: int) -> Path:
        """One JSON line per step: the indices of the images that one rank of one attempt used."""
        return self.path / "metrics" / "samples" / f"attempt-{attempt:03d}-rank-{rank:02d}.jsonl"

    def attempt_logs(self, attempt: int) -> Path:
        """The output of one attempt."""
        return self.logs / f"attempt-{attempt:03d}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        """The output of one rank of one attempt."""
        return self.attempt_logs(attempt) / f"rank-{rank:02d}.log"
