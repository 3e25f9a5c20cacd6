"""The directory of a sweep: what was asked for, Optuna's journal, the code, and the trials, which are ordinary runs."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hpc import cli
from hpc.core.errors import UserError
from hpc.core.files import write_json
from hpc.core.rundir import RunDir

Sampler = Literal["tpe", "random", "grid"]
Direction = Literal["maximize", "minimize"]
Pruner = Literal["median", "none"]


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """A sweep, resolved."""

    param: tuple[str, ...]
    trials: int
    parallel: int
    metric: str
    """By its name at trackers: `val/accuracy`."""
    direction: Direction
    sampler: Sampler
    pruner: Pruner
    seed: int
    arguments: tuple[str, ...]
    """The flags of all trials, with the user's defaults as they were."""
    script: tuple[str, ...]
    """The user's script; its arguments have `{NAME}` in the place of each parameter."""
    names: tuple[str, ...] | None
    """The files of the user's code, copied to `code/`; None: the script runs where it is."""
    revision: str | None
    """The git revision of that code."""


@dataclass(frozen=True)
class SweepDir:
    """The files of a sweep, by name."""

    path: Path

    @property
    def spec_file(self) -> Path:
        """What was asked for."""
        return self.path / cli.SWEEP_FILE

    @property
    def code(self) -> Path:
        """The user's code, as it was when the sweep was started: all trials run the same."""
        return self.path / "code"

    @property
    def journal(self) -> Path:
        """Optuna's journal."""
        return self.path / "journal.log"

    @property
    def cancelled(self) -> Path:
        """Exists after `hpc cancel` of the sweep."""
        return self.path / cli.CANCELLED_SWEEP

    @property
    def best(self) -> Path:
        """The flags of the best trial, for --config."""
        return self.path / "best.yaml"

    @property
    def page(self) -> Path:
        """The figures."""
        return self.path / "report" / "sweep.html"

    def trial(self, number: int) -> RunDir:
        """The run of a trial, by its number from 0."""
        return RunDir(self.path / f"trial-{number:03d}")

    def save(self, spec: SweepSpec) -> None:
        """Write `sweep.json`."""
        write_json(self.spec_file, asdict(spec))

    def load(self) -> SweepSpec:
        """Read it back. Raises UserError if it is damaged."""
        try:
            fields: dict[str, Any] = json.loads(self.spec_file.read_bytes())
            for name in ("param", "arguments", "script", "names"):
                fields[name] = None if fields[name] is None else tuple(fields[name])
            return SweepSpec(**fields)
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{self.spec_file} is damaged, or of another version: {error}") from error
