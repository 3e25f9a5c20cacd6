"""The run directory: every file name of a run, once. Runs everywhere.

The run directory is the job: what is not in it is not known. DESIGN: the table of section 3.
"""

from dataclasses import dataclass
from pathlib import Path

# In `final/`.
CONFUSION, SAMPLES = "confusion.csv", "samples.json"
CLASSES, HISTORY = "classes.csv", "history.csv"
# In `best/` too.
MODEL_WEIGHTS, MODEL_CARD = "model.safetensors", "model.json"


@dataclass(frozen=True)
class RunDir:
    """The files of one run, by name. Creates nothing by itself."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name is its directory's."""
        return self.path.name

    @property
    def spec(self) -> Path:
        """The resolved RunSpec, immutable."""
        return self.path / "spec.json"

    @property
    def script(self) -> Path:
        """The sbatch script; submitting it by hand starts or resumes the run."""
        return self.path / "submit.sbatch"

    @property
    def environment(self) -> Path:
        """The environment that it was submitted in: its next jobs are, too."""
        return self.path / "environment.json"

    @property
    def code(self) -> Path:
        """The snapshot of the code that the run executes."""
        return self.path / "code"

    @property
    def revision(self) -> Path:
        """The git revision of that code; there is none if it was in no repository."""
        return self.code / ".torchrelay" / "revision"

    @property
    def events(self) -> Path:
        """What happened: one file of JSON lines per writer."""
        return self.path / "events"

    @property
    def alive(self) -> Path:
        """Its time is the last sign of life of the head node's agent."""
        return self.path / "alive"

    @property
    def train_metrics(self) -> Path:
        """One JSON line per logged step."""
        return self.path / "metrics" / "train.jsonl"

    @property
    def eval_metrics(self) -> Path:
        """One JSON line per evaluation."""
        return self.path / "metrics" / "eval.jsonl"

    def sample_log(self, attempt: int, rank: int) -> Path:
        """One JSON line per step: which images one rank of one attempt used."""
        return self.path / "metrics" / "samples" / f"attempt-{attempt:03d}-rank-{rank:02d}.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """Durable checkpoints, one directory per step, visible only when complete."""
        return self.path / "checkpoints"

    @property
    def index(self) -> Path:
        """The list of the images of an image folder: the next attempt need not list a million files again."""
        return self.path / "index.npz"

    @property
    def diverged(self) -> Path:
        """Where the training diverged: the first step whose loss is not finite, and its images."""
        return self.path / "diverged.json"

    @property
    def best(self) -> Path:
        """The model that did best in validation."""
        return self.path / "best"

    @property
    def final(self) -> Path:
        """The final model and its test result: the run is complete when this exists."""
        return self.path / "final"

    @property
    def final_result(self) -> Path:
        """The test result."""
        return self.final / "result.json"

    @property
    def confusion(self) -> Path:
        """How often the test images of each class were taken for each class."""
        return self.final / CONFUSION

    @property
    def samples(self) -> Path:
        """Some images of the test with what they were taken for."""
        return self.final / SAMPLES

    @property
    def logs(self) -> Path:
        """All output."""
        return self.path / "logs"

    def attempt_logs(self, attempt: int) -> Path:
        """The output of one attempt."""
        return self.logs / f"attempt-{attempt:03d}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        """What one rank of one attempt printed."""
        return self.attempt_logs(attempt) / f"rank-{rank:02d}.log"

    @property
    def report(self) -> Path:
        """The report page."""
        return self.path / "report" / "index.html"
