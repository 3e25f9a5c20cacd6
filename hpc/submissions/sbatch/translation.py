"""Translates a batch script that starts a training into a command line of `hpc submit`. Runs on the login node.

What the translation does not understand, it refuses with the number of the line.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc.base.errors import UserError
from hpc.submissions.sbatch.batch_file import directives, is_login_shell
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
from hpc.submissions.sbatch.shell_lines import statements
from hpc.submissions.sbatch.statement_reader import SetupLine, StatementReader

_PROFILE = ("source /etc/profile || true", "[ ! -r ~/.bash_profile ] || source ~/.bash_profile || true")
_TASKS = {"ntasks", "ntasks-per-node", "ntasks-per-gpu"}


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
    """Translate the text of a batch script.

    Args:
        text: the text, which `read_batch_file` has checked.
        directory: the directory in which the user submits.
        environment: the variables of the user's shell, which sbatch passes on to the job.
        typed: the flags that the user has typed after the file.

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
    reader.setup += [SetupLine(line=1, text=line) for line in _PROFILE if is_login_shell(text)]
    reader.read(statements(text))
    launch, line = reader.launch, reader.launch_line
    if launch is None:
        raise UserError("no line starts a training: write srun python train.py, or torchrun train.py")
    exports = (SetupLine(line=line, text=f"export {name}={shlex.quote(value)}") for name, value in launch.exports)
    setup = (*reader.used_setup(), *exports)
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
