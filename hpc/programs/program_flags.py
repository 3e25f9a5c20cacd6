"""Defines what the launcher asks of each kind of program: to check its flags, name its data, and change its arguments.

There are two kinds: a user's own script (`hpc.programs.script_flags`), and the image classifier that ships with
Torchrelay (`training.config.classifier_program`). `hpc.programs.program_kinds` lists them. Runs on the login node.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.run.spec_file import Program


@dataclass(frozen=True, kw_only=True)
class ResolvedProgram:
    """A program whose flags are checked, as a submission needs it."""

    program: Program
    name: str
    """The first word of the run's default name."""
    data: Path | None
    """The directory or archive that every node stages; None if the program has no data to stage."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Further files that the nodes must see, by the flag that names them."""


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A run that has begun, for which `ProgramFlags.adjusted` checks changes."""

    run: RunDir
    typed: str
    """The run's name or directory, as the user typed it."""
    complete: bool
    ended: str | None = None
    """Why a complete training ended early; None for any other run."""


@dataclass(frozen=True, kw_only=True)
class ProgramFlags(ABC):
    """The flags of one program, which a submission has in addition to those of the launcher."""

    KIND: ClassVar[str]
    """The value of `Program.built_in`: empty for a user's own script."""
    TITLE: ClassVar[str]
    """The title of the flags in the help."""

    @classmethod
    @abstractmethod
    def of_run(cls, spec: RunSpec) -> Self:
        """Return the flags of a run's program."""

    @classmethod
    def preset(cls, settings: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ARG003 - a script has no presets
        """Return flags that apply unless `settings` has them, such as those of a recipe."""
        return {}

    @property
    def in_place(self) -> bool:
        """Whether the program runs where it is instead of from a copy."""
        return False

    @property
    def script(self) -> tuple[str, ...]:
        """The words of the user's own script; empty for a program that ships with Torchrelay."""
        return ()

    @abstractmethod
    def as_program(self) -> Program:
        """Return the program with these flags."""

    def check_installed(self) -> None:  # noqa: B027 - the packages of a script are in its own environment
        """Raise UserError if packages that the program needs on this machine are not installed."""

    @abstractmethod
    def resolve(self) -> ResolvedProgram:
        """Check the flags as far as possible on this machine. Raises UserError at the first mistake."""

    @abstractmethod
    def with_values(self, values: Mapping[str, str]) -> Self:
        """Return the flags of a trial of a sweep, with these values of arguments.

        Raises:
            UserError: the program has no such argument.
        """

    @abstractmethod
    def of_size(self, places: Mapping[str, str], *, growth: float, minutes: float) -> Self:
        """Return the flags of a run of a scaling study, which trains for some minutes.

        `places` has the values that a script may name in braces: the numbers of nodes, of GPUs per node and of ranks.
        `growth` is the batch of all ranks together, as a multiple of the smallest size's.
        """

    @abstractmethod
    def with_arguments(self, words: Sequence[str]) -> Self:
        """Return the flags with these words after the program's arguments. Raises UserError if a word is wrong."""

    @abstractmethod
    def adjusted(self, changes: Mapping[str, Any], begun: Begun) -> Self:
        """Return the flags with which `hpc resume` continues a run. `changes` are its flags of this program.

        Raises:
            UserError: the run cannot continue with them, or is complete.
        """

    @abstractmethod
    def describe(self) -> list[str]:
        """Return phrases that say what runs: the program and its data first, then its main settings."""

    def announcement(self) -> list[str]:
        """Return lines that say what a submission runs if the user has not named it."""
        return []

    def check_ranks(self, ranks: int, *, has_gpus: bool) -> None:  # noqa: B027 - a script has nothing to check
        """Raise UserError if the program cannot run as so many ranks, or only on GPUs that they do not have."""

    def warnings(self) -> list[str]:
        """Return warnings about flags and data that do not prevent a submission. Raises UserError as `resolve`."""
        return []

    def check_fork(self, changed: Collection[str], run: RunDir) -> None:  # noqa: B027 - a script has nothing to check
        """Raise UserError if a fork of `run` cannot change one of these flags."""

    def check_start(self, saved: Mapping[str, Any], checkpoint: str) -> None:  # noqa: B027 - a script has nothing to check
        """Raise UserError if a fork has nothing left to do after a checkpoint with these saved values by object."""
