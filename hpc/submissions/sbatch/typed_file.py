"""`hpc submit job.sbatch`: replaces a batch script on the command line by the flags and the script that it stands for.

Runs on the login node.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hpc.base import program
from hpc.base.errors import UserError
from hpc.base.flags import POSITIONAL
from hpc.base.text import visible
from hpc.commands import cli
from hpc.programs.program_kinds import KINDS
from hpc.submissions.options import SubmitOptions
from hpc.submissions.sbatch.sbatch_advice import explain
from hpc.submissions.user_python import user_environment

if TYPE_CHECKING:
    from hpc.submissions.sbatch.translation import Translation


@dataclass(frozen=True, kw_only=True)
class _SubmitFile(SubmitOptions):
    batch_file: Annotated[str | None, POSITIONAL] = None


def replace_file(arguments: list[str], script: tuple[str, ...]) -> tuple[list[str], tuple[str, ...]]:
    """Replace a batch script on the command line. Returns the flags and the script that the line then has.

    Without a batch script, both are returned unchanged. If there is one, prints the command line that it stands for and
    what was left out, and changes to the directory in which it starts the training.

    Raises:
        UserError: the batch script is not understood.
    """
    typed = _read(arguments)
    name = typed.pop("batch-file", None)
    if name is None or name.endswith(".py"):
        return arguments, script  # reading the flags says that `--` is missing before a Python script
    if script:
        raise UserError(
            f"{name} and -- {shlex.join(script)} are both given: leave out -- and what follows, because {name} starts "
            f"a program, too; or leave out {name}"
        )
    # Most submissions name no batch script, and need not compile the patterns of these modules.
    from hpc.submissions.sbatch.batch_file import read_batch_file  # noqa: PLC0415
    from hpc.submissions.sbatch.translation import translate  # noqa: PLC0415

    here = Path.cwd()
    text = read_batch_file(Path(name))
    try:
        translation = translate(text, here, os.environ, typed)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    rest = [word for at, word in enumerate(arguments) if at != arguments.index(name)]
    own, warnings = _further_flags(translation, typed, here)
    os.chdir(translation.directory)
    _show(translation, [*translation.words, *own, *rest], here, as_json="--json" in rest)
    for note in (*translation.notes, *(f"warning: {text}" for text in warnings)):
        print(visible(f"hpc submit: {note}"), file=sys.stderr)
    return [*translation.words, *own, *rest], translation.launch.script


def _read(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the typed flags, and the batch script as `batch-file`. Returns nothing if the verb itself refuses them."""
    if not {"-h", "--help", "--help-all"}.isdisjoint(arguments):
        return {}
    try:
        return program.read((_SubmitFile, *KINDS), arguments, "hpc submit", explain)
    except UserError:
        if arguments[0].endswith(".py") or not Path(arguments[0]).is_file():
            return {}
        raise


def _further_flags(translation: "Translation", typed: dict[str, Any], here: Path) -> tuple[list[str], list[str]]:
    """Return --runs-dir if the training starts elsewhere, --python if the batch script chooses one, and warnings."""
    from hpc.submissions.sbatch.script_python import find_python  # noqa: PLC0415

    words, warnings = list[str](), list[str]()
    if translation.directory != here and not (runs_dir := cli.runs_dir(typed).expanduser()).is_absolute():
        words = ["--runs-dir", str(here / runs_dir)]
    if translation.launch.container is None and not typed.keys() & {"python", "container", "stage-env"}:
        python, warnings = find_python(translation.setup, translation.launch.words[0], translation.directory)
        usual = user_environment.find_python()
        if python and python != (usual.path if usual else Path(sys.executable)):
            words += ["--python", str(python)]
    return words, warnings


def _show(translation: "Translation", words: Sequence[str], here: Path, *, as_json: bool) -> None:
    shown = [word for word in words if word != "--dry-run"]
    line = f"{cli.own_command()} submit {shlex.join([*shown, '--', *translation.launch.script])}"
    if translation.directory != here:
        line = f"cd {shlex.quote(str(translation.directory))} && {line}"
    print(visible(line), file=sys.stderr if as_json else sys.stdout, flush=True)
