"""The run directory: every file name of a run, once. Runs everywhere.

Everything that is known of a run stands in its directory. DESIGN: the table of section 3.
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
    """The files of one run, by name. Creates none."""

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
        """The environment variables at submission, for the run's later jobs."""
        return self.path / "environment.json"

    @property
    def code(self) -> Path:
        """The copy of the code that the run executes."""
        return self.path / "code"

    @property
    def packages(self) -> Path:
        """Our three packages in that copy."""
        return self.code / ".torchrelay"

    @property
    def revision(self) -> Path:
        """The git revision of the code; absent if it was in no repository."""
        return self.packages / "revision"

    @property
    def events(self) -> Path:
        """What happened: one file of JSON lines per writer."""
        return self.path / "events"

    @property
    def alive(self) -> Path:
        """Its modification time is the newest heartbeat of the head node's agent."""
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
        """One JSON line per step: the indices of the images that one rank of one attempt used."""
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
        """The list of the files of an image folder, so that later attempts need not list them again."""
        return self.path / "index.npz"

    @property
    def diverged(self) -> Path:
        """The first step whose loss is not finite, and its images."""
        return self.path / "diverged.json"

    @property
    def best(self) -> Path:
        """The model with the best validation metric."""
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
        """The confusion matrix of the test."""
        return self.final / CONFUSION

    @property
    def samples(self) -> Path:
        """Some test images with their predictions."""
        return self.final / SAMPLES

    @property
    def logs(self) -> Path:
        """All output."""
        return self.path / "logs"

    def attempt_logs(self, attempt: int) -> Path:
        """The output of one attempt."""
        return self.logs / f"attempt-{attempt:03d}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        """The output of one rank of one attempt."""
        return self.attempt_logs(attempt) / f"rank-{rank:02d}.log"

    @property
    def report(self) -> Path:
        """The report page."""
        return self.path / "report" / "index.html"
