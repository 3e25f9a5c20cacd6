"""A user's own script as the launcher sees it: its words, its data, and its program. Runs on the login node."""

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from hpc.base.errors import UserError
from hpc.base.flags import INTERNAL
from hpc.base.text import did_you_mean
from hpc.programs.program_flags import Begun, ProgramFlags, ResolvedProgram
from hpc.run.spec import RunSpec, program_of
from hpc.run.spec_file import Program, script_program
from hpc.sources import archive
from hpc.sources.source_files import ARCHIVES, is_archive

# Modules that start a script, and are themselves none.
_LAUNCHERS = ("torch.distributed", "accelerate.", "deepspeed.")


@dataclass(frozen=True, kw_only=True)
class OwnScript:
    """Flags of your own script (-- script.py ARGS). It finds --data, any directory or archive, in $TORCHRELAY_DATA.

    Further flags for scripts are --python, --container, --stop-signal and --grace-period (see hpc submit --help-all).
    """

    in_place: bool = False
    """Run the script where it is instead of from a copy: edits then change the run when it restarts."""


@dataclass(frozen=True, kw_only=True)
class ScriptRequest(OwnScript):
    """The flags of a user's own script, one by one."""

    data: Path | None = None
    """Directory or archive to stage on every node; the script finds it, unpacked, in $TORCHRELAY_DATA."""


@dataclass(frozen=True, kw_only=True)
class ScriptFlags(ScriptRequest, ProgramFlags):
    """The flags of a user's own script, and its words."""

    KIND: ClassVar[str] = ""
    TITLE: ClassVar[str] = "own script"

    script: Annotated[tuple[str, ...], INTERNAL] = ()

    @classmethod
    def of_run(cls, spec: RunSpec) -> Self:
        """Return the flags of a run's script."""
        data = None if spec.data is None else Path(spec.data)
        return cls(script=spec.program.argv, data=data, in_place=bool(spec.in_place))

    def as_program(self) -> Program:
        """Return the program, whose modules are found from the working directory."""
        return script_program(self.script)

    def resolve(self) -> ResolvedProgram:
        """Check that the script and its data exist. Raises UserError if they do not."""
        _check_script(self.script, has_data=self.data is not None)
        module = self.script[1].rpartition(".")[2] if self.script[0] == "-m" else Path(self.script[0]).stem
        return ResolvedProgram(
            program=self.as_program(), name=module, data=None if self.data is None else _checked(self.data)
        )

    def with_values(self, values: Mapping[str, str]) -> Self:
        """Return the script with each value in place of `{NAME}`, or as `--NAME=VALUE` after its arguments."""
        more = [f"--{name}={value}" for name, value in values.items() if f"{{{name}}}" not in "\0".join(self.script)]
        return replace(self, script=(*_filled(self.script, values), *more))

    def of_size(self, places: Mapping[str, str], *, growth: float, minutes: float) -> Self:  # noqa: ARG002
        """Return the script with the numbers in place of `{nodes}`, `{gpus_per_node}` and `{ranks}`."""
        return replace(self, script=_filled(self.script, places))

    def with_arguments(self, words: Sequence[str]) -> Self:
        """Return the script with more words. Nearly all parsers take the last value of an argument."""
        return replace(self, script=(*self.script, *words))

    def adjusted(self, changes: Mapping[str, Any], begun: Begun) -> Self:
        """Return the flags as they are: only a new run, or a fork, can change a script's arguments."""
        for name in sorted(changes):
            words = f"--{name} ..." if name in {"data", "in-place"} else f"-- --{name} ..."
            raise UserError(
                f"--{name} cannot change in run {begun.run.name}, which runs {program_of(self.script)}: leave it out, "
                f"or type hpc fork {begun.typed} --name NEW {words}"
            )
        if begun.complete:
            raise UserError(
                f"run {begun.run.name} is complete: its script ended with exit code 0; submit it under a new name"
            )
        return self

    def describe(self) -> list[str]:
        """Return the command line of the script."""
        return [" ".join(self.script)]


def _filled(words: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """Return words with the values in place of their names in braces; other braces stay."""
    return tuple(re.sub(r"\{([\w-]+)\}", lambda match: values.get(match[1], match[0]), word) for word in words)


def _checked(data: Path) -> Path:
    """Return the absolute path of the directory or archive to stage. Raises UserError if it is neither."""
    if is_archive(data):
        return archive.checked(data)
    if not data.is_dir():
        raise UserError(
            f"--data is {data}, which is neither a directory nor an archive ({', '.join(ARCHIVES)}): "
            "give one of these, or leave it out"
        )
    return data.absolute()


def _check_script(script: tuple[str, ...], *, has_data: bool) -> None:
    """Refuse a missing script, a file that is not Python, a module without a name, and {data} without --data."""
    if not has_data and (word := next((word for word in script[1:] if "{data}" in word), None)):
        raise UserError(f"{word!r} asks for the place of the data on the node, but there is no --data: give one")
    if script[0] == "-m":
        name = script[1] if len(script) > 1 else ""
        if not all(map(str.isidentifier, name.split("."))):
            raise UserError("-m needs the name of a module: -- -m package.module ARGS")
        return
    path = Path(script[0])
    if not path.is_file() and (own := _script_within(script)):
        raise UserError(f"{script[0]!r} is not a Python file, and hpc submit itself starts the ranks: type {own}")
    if path.suffix == ".sh" or (not path.exists() and shutil.which(script[0])):
        raise UserError(f"{script[0]!r} is not a Python file: after --, give the file that it runs on each rank")
    if not path.is_file():
        files = [file.name for file in path.parent.glob("*.py")]
        hint = did_you_mean(path.name, files, "give the path of a Python file after --")
        raise UserError(f"script {script[0]!r} does not exist: {hint}")


def _script_within(words: tuple[str, ...]) -> str | None:
    """Return what to type for a command line that starts a script, such as `accelerate launch train.py`; else None."""
    for place, word in enumerate(words[1:], 1):
        if word.endswith(".py") and Path(word).is_file():
            return f"-- {shlex.join(words[place:])}"
        if word in {"-m", "--module"} and len(words) > place + 1 and not words[place + 1].startswith(_LAUNCHERS):
            return f"-- {shlex.join(('-m', *words[place + 1 :]))}"
    return None
