"""Translates a batch script that starts a training into a command line of `hpc submit`. Runs on the login node.

What the translation does not understand, it refuses with the number of the line.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc.base.errors import UserError
from hpc.base.files import expanded
from hpc.base.text import did_you_mean
from hpc.submissions.sbatch.batch_options import (
    Layout,
    Option,
    flags_of,
    layout_of,
    read_directive,
    variables,
    without_typed,
)
from hpc.submissions.sbatch.launch_line import Launch
from hpc.submissions.sbatch.statement_reader import SetupLine, StatementReader, statements

_INTERPRETERS = {"bash", "sh"}
_SUFFIXES = {".sbatch", ".slurm", ".sh", ".job"}
_PROFILE = ("source /etc/profile || true", "[ ! -r ~/.bash_profile ] || source ~/.bash_profile || true")
_TASKS = {"ntasks", "ntasks-per-node", "ntasks-per-gpu"}
# Lines that may change which Python the PATH finds; and plain assignments, which such lines may use.
_CHOOSES = re.compile(r"(module|ml|source|\.|conda|mamba|micromamba|eval|cd)\s|(export\s+)?PATH=")
_ASSIGNS = re.compile(r"(export\s+)?\w+=([^$`]*|[\w./${}:-]*)")
_SECONDS = 60.0
# Prints the number of each line that fails after its errors, and then the path of the program.
_PROGRAM = r"""
program=$1 number=0
shift
for line; do
  eval "$line" >/dev/null </dev/null || printf '\ntorchrelay:%d\n' $number >&2
  number=$((number + 1))
done
type -P "$program"
"""


def read_batch_file(path: Path) -> str:
    """Return the text of a batch script. Raises UserError if sbatch or Bash would refuse it, or if it is in Python."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError as error:
        scripts = [file.name for file in path.parent.glob("*") if file.suffix in _SUFFIXES]
        hint = did_you_mean(path.name, scripts, "give the path of one, or -- script.py ARGS for a script alone")
        raise UserError(f"there is no batch script {path}: {hint}") from error
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a text file: give a batch script, or -- script.py ARGS") from error
    _check_is_bash(path, text)
    return text


def _check_is_bash(path: Path, text: str) -> None:
    """Raise UserError if a text is not a batch script in Bash."""
    quoted, first = shlex.quote(str(path)), text.partition("\n")[0].rstrip("\r")
    words = [Path(word).name for word in first.removeprefix("#!").split()]
    interpreter = next((word for word in words if word != "env" and not word.startswith("-")), "")
    if first.startswith("#!") and "python" in interpreter:
        raise UserError(f"{path} is a Python script: put -- before it: hpc submit -- {quoted}")
    if "\r\n" in text:
        raise UserError(f"{path} has DOS line breaks (CRLF), which sbatch refuses: type sed -i 's/\\r$//' {quoted}")
    if not first.startswith("#!"):
        raise UserError(f"{path} does not begin with #!/bin/bash, so sbatch would refuse it: write this line first")
    if interpreter not in _INTERPRETERS:
        raise UserError(f"{path} is a script for {interpreter}: hpc submit reads Bash alone, so write it in Bash")
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        problem = done.stderr.partition("\n")[0].removeprefix("bash: ")
        raise UserError(f"{path} is not valid Bash ({problem}): type bash -n {quoted}")


def directives(text: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Return two lists of `#SBATCH` lines with their numbers, without the prefix.

    Slurm reads the lines of the first list, and ignores those of the second, which come after the first command.
    """
    read, ignored = list[tuple[int, str]](), list[tuple[int, str]]()
    target = read
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#SBATCH"):
            target.append((number, line.removeprefix("#SBATCH")))
        elif line.strip() and not line.strip().startswith("#"):
            target = ignored
    return read, ignored


@dataclass(frozen=True, kw_only=True)
class Translation:
    """The command line of `hpc submit` that does what a batch script does."""

    flags: Mapping[str, list[str]]
    """The values of each flag."""
    launch: Launch
    """The command whose script and arguments follow `--`."""
    setup: tuple[SetupLine, ...]
    """The lines of the flag --setup."""
    directory: Path
    """The directory in which to type the command line."""
    notes: tuple[str, ...]
    """Sentences about the lines that were left out, with the reasons, and about what no line says."""

    @property
    def words(self) -> list[str]:
        """The flags as words of a command line."""
        return [word for name, values in self.flags.items() for value in values for word in (f"--{name}", value)]


def translate(
    text: str, directory: Path, environment: Mapping[str, str], typed: Mapping[str, object] | None = None
) -> Translation:
    """Translate the text of a batch script, which `read_batch_file` has checked.

    `environment` has the variables of the user's shell, which sbatch passes on, and `typed` the flags after the file.

    Raises:
        UserError: a line is not understood, or lines contradict each other.
    """
    typed, notes = typed or {}, list[str]()
    read, ignored = directives(text)
    options = {option.name: option for number, line in read for option in read_directive(line, number)}
    flags = flags_of(options, notes)
    notes += [
        f"line {number}: Slurm ignores #SBATCH{line} after the first command: move it up, or type the flag"
        for number, line in ignored
    ]
    batch = layout_of(options, str(typed["nodes"]) if "nodes" in typed else None)
    start = directory / options["chdir"].value if "chdir" in options else directory
    if not start.is_dir():
        raise options["chdir"].error(": there is no such directory here")
    values = {**variables(options, batch), "SLURM_SUBMIT_DIR": str(directory)}
    reader = StatementReader(start, environment, values)
    if {"-l", "--login"} & set(text.partition("\n")[0].split()):  # a login shell reads the profile
        reader.setup += [SetupLine(line=1, text=line) for line in _PROFILE]
    reader.read(statements(text))
    launch, line = reader.launch, reader.launch_line
    if launch is None:
        raise UserError("no line starts a training: write srun python train.py, or torchrun train.py")
    setup = tuple(reader.used_setup())
    for name, value in launch.exports:
        text = f"export {name}={shlex.quote(value)}"
        if name.endswith("_BIND") and (name in environment or any(name in line.text for line in setup)):
            text += f'"${{{name}:+,${name}}}"'  # --bind adds to the variable
        setup = (*setup, SetupLine(line=line, text=text))
    flags = {
        **_resources(options, batch, launch, line, typed, notes), **flags,
        "container": [launch.container] if launch.container else [], "setup": [line.text for line in setup],
    }  # fmt: skip
    launchers = ["srun"] * (launch.step is not None) + [launch.words[0]] * (not launch.starts_one_each)
    if launchers:
        text = f"left out line {line}: {' '.join(launchers)}: hpc submit starts the ranks, one per GPU"
        reader.notes.append((line, text))
    notes += [note for _, note in sorted(reader.notes, key=lambda note: note[0])]
    kept = {name: values for name, values in without_typed(flags, typed).items() if values}
    return Translation(flags=kept, launch=launch, setup=setup, directory=reader.directory, notes=tuple(notes))


def _resources(
    options: Mapping[str, Option],
    batch: Layout,
    launch: Launch,
    line: int,
    typed: Mapping[str, object],
    notes: list[str],
) -> dict[str, list[str]]:
    """Return the flags for the nodes, and for the GPUs and CPUs of each.

    Raises:
        UserError: the program does not start the same number of processes on each node, one for each GPU.
    """
    step = {option.name: option for option in launch.step or ()}
    own = {name: option for name, option in options.items() if not (name in _TASKS and step.keys() & _TASKS)}
    layout = layout_of({**own, **step}, batch.nodes) if step else batch
    if launch.step is None and layout.nodes != "1":
        raise UserError(
            f"line {line}: without srun, the program starts on one of {layout.nodes} nodes: write srun before it"
        )
    if launch.step is not None and not launch.starts_one_each and layout.tasks > 1:
        raise UserError(f"line {line}: srun starts {layout.tasks} launchers per node: write srun --ntasks-per-node=1")
    has_ranks = launch.step is not None and launch.starts_one_each
    gpus = _gpus(layout.gpus, layout.tasks if has_ranks else launch.processes, line, typed, notes)
    flags = {"nodes": [layout.nodes], "gpus-per-node": [f"{layout.gpu_type}:{gpus}" if layout.gpu_type else str(gpus)]}
    share = layout if "cpus-per-task" in step else batch
    # Several tasks that are no processes of the training only ask for CPUs.
    if share.cpus_per_task is not None or (share.tasks > 1 and not has_ranks):
        cpus = share.tasks * (share.cpus_per_task or 1)
        typed_gpus = str(typed.get("gpus-per-node", gpus)).rpartition(":")[2]
        ranks = max(1, int(typed_gpus)) if typed_gpus.isdigit() else 1
        flags["cpus-per-gpu"] = [str(max(1, cpus // ranks))]
        if cpus % ranks:
            notes.append(f"{ranks} ranks cannot share {cpus} CPUs per node equally: {cpus % ranks} are not asked for")
    return flags


def _gpus(asked: int | None, processes: int | None, line: int, typed: Mapping[str, object], notes: list[str]) -> int:
    """Return the GPUs per node. Raises UserError if they are not as many as the processes."""
    is_settled = "gpus-per-node" in typed
    if asked is None:
        gpus = processes if processes is not None and processes > 1 else 0
        which = f"each of the {gpus} processes per node of line {line} gets one"
        effect = which if gpus else "one rank per node uses its CPUs (else type --gpus-per-node N)"
        notes += [] if is_settled else [f"no line asks for GPUs: {effect}"]
        return gpus
    if processes not in {None, asked} and not is_settled:
        raise UserError(
            f"line {line}: processes per node: {processes}, GPUs per node: {asked}, and a run has one rank per GPU: "
            f"type --gpus-per-node {asked} or {processes} after the file"
        )
    return asked


# --- the Python of the script ---


def find_python(setup: Sequence[SetupLine], program: str, directory: Path) -> tuple[Path | None, list[str]]:
    """Return the Python of a program such as `torchrun`, and warnings. None if the lines do not choose a Python.

    Runs the lines that may choose one, in Bash, as the job would.
    """
    if "/" in program:
        return _interpreter(directory / expanded(program)), []
    lines = [line for line in setup if _CHOOSES.match(line.text) or _ASSIGNS.fullmatch(line.text)]
    if not any(_CHOOSES.match(line.text) for line in lines):
        return None, []
    command = ["bash", "-c", _PROGRAM, "bash", program, *(line.text for line in lines)]
    try:
        done = subprocess.run(
            command, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, [f"the lines before {program} take longer than {_SECONDS:.0f} s here: add --python ENV/bin/python"]
    warnings = [
        f"line {lines[int(number)].line}: {lines[int(number)].text!r} fails on this machine ({error or 'no message'}): "
        "if it chooses the Python of the training, add --python ENV/bin/python"
        for error, number in re.findall(r"(?:bash: line \d+: )?([^\n]*)\n+torchrelay:(\d+)\n", done.stderr)
    ]
    path = done.stdout.strip()
    return (_interpreter(Path(path)) if path and path != shutil.which(program) else None), warnings


def _interpreter(program: Path) -> Path:
    """Return the interpreter of a program, which is one itself, or a script such as torchrun."""
    if "python" in program.name:
        return program
    first = b""
    if program.is_file():
        with program.open("rb") as file:
            first = file.readline(4096)
    word = os.fsdecode(first.removeprefix(b"#!").strip()).partition(" ")[0]
    return Path(word) if "python" in word else program.with_name("python")
