"""The directory of a group: what was asked for, the user's code as it was then, and the runs."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from hpc.base import program
from hpc.base.errors import UserError
from hpc.base.files import write_json
from hpc.commands import cli
from hpc.run.rundir import RunDir
from hpc.submit.options import options_for


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """What all runs of a group have."""

    parallel: int
    """Runs at the same time."""
    settings: Mapping[str, Any]
    """Flags without dashes and their values, with the user's defaults as they were."""
    script: tuple[str, ...]
    """The user's script; its arguments have `{NAME}` in the place of what differs between the runs."""
    working_directory: str = "."
    """The directory that the script starts in: below `code/`, or an absolute path if the script runs in place."""
    names: tuple[str, ...] | None
    """The files of the user's code, copied to `code/`; None: the script runs where it is."""
    revision: str | None
    """The git revision of that code."""


Spec = TypeVar("Spec", bound=GroupSpec)


@dataclass(frozen=True)
class GroupDir(Generic[Spec]):
    """The files of a group, by name. A subclass says which kind of group it is."""

    path: Path

    KIND: ClassVar[str]
    """One of `cli.GROUPS`."""
    TITLE: ClassVar[str]
    """The kind in a sentence."""
    SPEC: ClassVar[type[GroupSpec]]

    @property
    def spec_file(self) -> Path:
        """What was asked for."""
        return self.path / f"{self.KIND}.json"

    @property
    def code(self) -> Path:
        """The user's code, as it was when the group was started: all runs have the same."""
        return self.path / "code"

    @property
    def cancelled(self) -> Path:
        """Exists after `hpc cancel` of the group."""
        return self.path / cli.CANCELLED_GROUP

    @property
    def page(self) -> Path:
        """The figures."""
        return self.path / "report" / f"{self.KIND}.html"

    def run(self, name: str) -> RunDir:
        """One of its runs, whose name begins with that of the group: Slurm and trackers show it alone."""
        return RunDir(self.path / f"{self.path.name}-{name}")

    def save(self, spec: Spec) -> None:
        """Write what was asked for."""
        write_json(self.spec_file, asdict(spec))

    def load(self) -> Spec:
        """Read it back. Raises UserError if it is damaged."""
        try:
            found: dict[str, Any] = json.loads(self.spec_file.read_bytes())
            if "settings" not in found:  # up to version 0.1, a group kept the words of its command line
                kind = options_for(tuple(found["script"]))
                found["settings"] = program.read((kind,), found["arguments"], f"hpc {self.KIND}")
            # JSON has no tuples.
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
            return self.SPEC(**{field.name: values[field.name] for field in fields(self.SPEC) if field.name in values})  # type: ignore[arg-type, return-value]
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{self.spec_file} is damaged, or of another version: {error}") from error
