"""`hpc submit job.sbatch`: adds the flags and the script that a batch script stands for. Runs on the login node."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hpc.base.errors import UserError
from hpc.base.files import expanded
from hpc.base.flag_files import overlay
from hpc.base.flags import Flag
from hpc.base.text import visible
from hpc.commands import cli
from hpc.submissions.options import SubmitOptions, completed
from hpc.submissions.sbatch.sbatch_advice import explain
from hpc.submissions.user_python import user_environment

if TYPE_CHECKING:
    from hpc.submissions.sbatch.translation import Translation


@dataclass(frozen=True, kw_only=True)
class SubmitFile(SubmitOptions):
    """The flags of `hpc submit`, and a batch script."""

    file: Annotated[str | None, Flag(metavar="[job.sbatch]", is_positional=True)] = None
    """Batch script that works with sbatch; flags after it win over those in it."""


SubmitFile.__doc__ = SubmitOptions.__doc__


def with_file(typed: Mapping[str, Any], arguments: Sequence[str], script: tuple[str, ...]) -> SubmitOptions:
    """Return the completed options of `hpc submit`, with those of a batch script if one is typed.

    Of a batch script, prints the command line that it stands for and what was left out, and changes to the directory in
    which it starts the training. `arguments` are the words before `--`, and `script` the words after it.

    Raises:
        UserError: a flag is wrong, or the batch script is not understood.
    """
    typed = dict(typed)
    name = typed.pop("file", None)
    if name is None:
        return completed(typed, SubmitOptions, script)
    if name.endswith(".py"):
        raise UserError(explain(arguments, arguments.index(name)))
    if script:
        raise UserError(
            f"{name} and -- {shlex.join(script)} are both given: leave out -- and what follows, because {name} starts "
            f"a program, too; or leave out {name}"
        )
    # Most submissions name no batch script, and need not compile the patterns of this module.
    from hpc.submissions.sbatch.translation import read_batch_file, translate  # noqa: PLC0415

    here = Path.cwd()
    text = read_batch_file(Path(name))
    try:
        translation = translate(text, here, os.environ, typed)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    own, warnings = _further_flags(translation, typed, here)
    os.chdir(translation.directory)
    at = arguments.index(name)
    _show(translation, own, [*arguments[:at], *arguments[at + 1 :]], here)
    for note in (*translation.notes, *(f"warning: {text}" for text in warnings)):
        print(visible(f"hpc submit: {note}"), file=sys.stderr)
    lists = {"sbatch", "setup"}
    flags = {flag: values if flag in lists else values[0] for flag, values in translation.flags.items()}
    return completed(overlay({**flags, **own}, typed), SubmitOptions, translation.launch.script)


def _further_flags(translation: "Translation", typed: dict[str, Any], here: Path) -> tuple[dict[str, str], list[str]]:
    """Return --runs-dir if the training starts elsewhere, --python if the batch script chooses one, and warnings."""
    from hpc.submissions.sbatch.translation import find_python  # noqa: PLC0415

    flags, warnings = dict[str, str](), list[str]()
    if translation.directory != here and not (runs_dir := expanded(cli.runs_dir(typed))).is_absolute():
        flags["runs-dir"] = str(here / runs_dir)
        typed.pop("runs-dir", None)
    if translation.launch.container is None and not typed.keys() & {"python", "container", "stage-env"}:
        python, warnings = find_python(translation.setup, translation.launch.words[0], translation.directory)
        if python and python != (user_environment.find_python() or Path(sys.executable)):
            flags["python"] = str(python)
    return flags, warnings


def _show(translation: "Translation", own: Mapping[str, str], typed: Sequence[str], here: Path) -> None:
    found = [word for flag, value in own.items() for word in (f"--{flag}", value)]
    words = [*translation.words, *(word for word in typed if word != "--dry-run"), *found]
    line = f"{cli.own_command()} submit {shlex.join([*words, '--', *translation.launch.script])}"
    if translation.directory != here:
        line = f"cd {shlex.quote(str(translation.directory))} && {line}"
    print(visible(line), file=sys.stderr if "--json" in typed else sys.stdout, flush=True)
