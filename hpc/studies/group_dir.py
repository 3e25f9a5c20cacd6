"""The directory of a group of runs, such as a sweep: its spec, the copy of the user's code, and the runs."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from hpc.base.errors import UserError
from hpc.base.files import write_json
from hpc.commands import cli
from hpc.run.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """The settings that all runs of a group have in common."""

    parallel: int
    """The maximum number of runs at the same time."""
    settings: Mapping[str, Any]
    """Values by flag without dashes, including the user's defaults at the start of the group."""
    script: tuple[str, ...]
    """The user's script and its arguments, which may have `{NAME}` in place of a value that the runs differ in."""
    working_directory: str = "."
    """The directory in which the script starts: below `code/`, or an absolute path if the script runs in place."""
    revision: str | None
    """Git revision of the copied code; None if unknown, or if the script runs in place."""


Spec = TypeVar("Spec", bound=GroupSpec)


@dataclass(frozen=True)
class GroupDir(Generic[Spec]):
    """The files of a group, by name. A subclass defines the kind of group."""

    path: Path

    KIND: ClassVar[str]
    """The kind of group: one of `cli.GROUPS`."""
    TITLE: ClassVar[str]
    """The words for this kind of group in a sentence."""
    SPEC: ClassVar[type[GroupSpec]]

    @property
    def spec_file(self) -> Path:
        """The file of the group's spec."""
        return self.path / f"{self.KIND}.json"

    @property
    def code(self) -> Path:
        """The directory with the user's code as it was at the start of the group. Each run gets the same."""
        return self.path / "code"

    @property
    def cancelled(self) -> Path:
        """A file that exists once `hpc cancel` has cancelled the group."""
        return self.path / cli.CANCELLED_GROUP

    @property
    def page(self) -> Path:
        """The file of the group's HTML page."""
        return self.path / "report" / f"{self.KIND}.html"

    def run(self, name: str) -> RunDir:
        """Return a run of the group. Its name begins with the group's, because Slurm and trackers show no groups."""
        return RunDir(self.path / f"{self.path.name}-{name}")

    def save(self, spec: Spec) -> None:
        """Write the group's spec."""
        write_json(self.spec_file, asdict(spec))

    def load(self) -> Spec:
        """Read the group's spec. Raises UserError if it is damaged."""
        try:
            found: dict[str, Any] = json.loads(self.spec_file.read_bytes())
            # JSON has turned tuples into lists.
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
            return self.SPEC(**{field.name: values[field.name] for field in fields(self.SPEC) if field.name in values})  # type: ignore[arg-type, return-value]
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{self.spec_file} is damaged, or of another version: {error}") from error
