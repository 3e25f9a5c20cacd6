"""The run directory: every file name of a run, once. Runs everywhere."""

from dataclasses import dataclass
from pathlib import Path

# In `final/`.
CONFUSION, SAMPLES, CLASSES, HISTORY = "confusion.csv", "samples.json", "classes.csv", "history.csv"
# In `best/` too.
MODEL_WEIGHTS, MODEL_CARD = "model.safetensors", "model.json"


@dataclass(frozen=True)
class _Below:
    """A path in the run directory."""

    name: str

    def __get__(self, run: "RunDir", _: type) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDir:
    """The files of one run, by name. Creates none."""

    path: Path

    spec = _Below("spec.json")
    """The resolved RunSpec, immutable."""
    script = _Below("submit.sbatch")
    """The sbatch script; submitting it by hand starts or resumes the run."""
    environment = _Below("environment.json")
    """The environment variables at submission, for the run's later jobs."""
    code = _Below("code")
    """The copy of the code that the run executes."""
    packages = _Below("code/.torchrelay")
    """Our three packages in that copy."""
    revision = _Below("code/.torchrelay/revision")
    """The git revision of the code; absent if it was in no repository."""
    events = _Below("events")
    """What happened: one file of JSON lines per writer."""
    alive = _Below("alive")
    """Its modification time is the newest heartbeat of the head node's agent."""
    train_metrics = _Below("metrics/train.jsonl")
    """One JSON line per logged step."""
    eval_metrics = _Below("metrics/eval.jsonl")
    """One JSON line per evaluation."""
    tensorboard = _Below("tensorboard")
    """TensorBoard's event files."""
    checkpoints = _Below("checkpoints")
    """Durable checkpoints, one directory per step, visible only when complete."""
    index = _Below("index.npz")
    """The list of the files of an image folder, so that later attempts need not list them again."""
    diverged = _Below("diverged.json")
    """The first step whose loss is not finite, and its images."""
    best = _Below("best")
    """The model with the best validation metric."""
    final = _Below("final")
    """The final model and its test result: the run is complete when this exists."""
    final_result = _Below("final/result.json")
    """The test result."""
    confusion = _Below(f"final/{CONFUSION}")
    """The confusion matrix of the test."""
    samples = _Below(f"final/{SAMPLES}")
    """Some test images with their predictions."""
    logs = _Below("logs")
    """All output."""
    report = _Below("report/index.html")
    """The report page."""

    @property
    def name(self) -> str:
        """The run's name is its directory's."""
        return self.path.name

    def sample_log(self, attempt: int, rank: int) -> Path:
        """One JSON line per step: the indices of the images that one rank of one attempt used."""
        return self.path / "metrics" / "samples" / f"attempt-{attempt:03d}-rank-{rank:02d}.jsonl"

    def attempt_logs(self, attempt: int) -> Path:
        """The output of one attempt."""
        return self.logs / f"attempt-{attempt:03d}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        """The output of one rank of one attempt."""
        return self.attempt_logs(attempt) / f"rank-{rank:02d}.log"
