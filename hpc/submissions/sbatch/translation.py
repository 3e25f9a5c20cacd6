"""Translates a batch script that starts a training into a command line of `hpc submit`. Pure; runs on the login node.

What the translation does not understand, it refuses with the number of the line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc.base.errors import UserError
from hpc.submissions.sbatch.batch_file import directives, is_login_shell
from hpc.submissions.sbatch.batch_options import Layout, Option, flags_of, layout_of, read_directive, without_typed
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
    setup: tuple[SetupLine, ...]
    """The lines of the flag --setup."""
    directory: Path
    """The directory in which to type the command line."""
    notes: tuple[str, ...]
    """Sentences about the lines that were left out, with the reasons, and about what no line says."""

    @property
    def script(self) -> tuple[str, ...]:
        """The words after `--`."""
        return self.launch.script

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
        raise UserError(f"line {options['chdir'].line}: {options['chdir']}: there is no such directory here")
    reader = StatementReader(start, environment, {**batch.variables, "SLURM_SUBMIT_DIR": str(directory)})
    reader.setup += [SetupLine(line=1, text=line) for line in _PROFILE if is_login_shell(text)]
    reader.read(statements(text))
    launch, line = reader.launch, reader.launch_line
    if launch is None:
        raise UserError("no line starts a training: write srun python train.py, or torchrun train.py")
    setup = [*reader.used_setup(), *(SetupLine(line=line, text=export) for export in launch.exports)]
    flags = {
        **_resources(options, batch, launch, line, typed, notes), **flags,
        "container": [launch.container] if launch.container else [], "setup": [line.text for line in setup],
    }  # fmt: skip
    launchers = ["srun"] * (launch.step is not None) + [launch.python] * (not launch.starts_one_each)
    if launchers:
        reader.notes.append(f"left out line {line}: {' '.join(launchers)}: hpc submit starts the ranks, one per GPU")
    return Translation(
        flags=without_typed(flags, typed), launch=launch, setup=tuple(setup), directory=reader.directory,
        notes=(*notes, *reader.notes),
    )  # fmt: skip


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
    tasks, has_srun = layout.tasks if launch.step is not None else 1, launch.step is not None
    if not has_srun and layout.nodes != "1":
        raise UserError(
            f"line {line}: without srun, the program starts on one of {layout.nodes} nodes: write srun before it"
        )
    if launch.nodes is not None and layout.nodes.isdigit() and launch.nodes != int(layout.nodes):
        raise UserError(f"line {line}: {launch.python} expects {launch.nodes} nodes, and the job has {layout.nodes}")
    if not launch.starts_one_each and tasks > 1:
        raise UserError(f"line {line}: srun starts {tasks} launchers per node: write srun --ntasks-per-node=1")
    processes = tasks if launch.starts_one_each else launch.processes
    if launch.total is not None and layout.nodes.isdigit():
        processes = launch.total // int(layout.nodes)
    gpus = _gpus(layout.gpus, processes, line, notes, is_settled="gpus-per-node" in typed)
    named = f"{layout.gpu_type}:{gpus}" if layout.gpu_type else str(gpus)
    flags = {"nodes": [layout.nodes], "gpus-per-node": [named]}
    cpus = (layout if "cpus-per-task" in step else batch).cpus(one_each=has_srun and launch.starts_one_each)
    share = str(typed.get("gpus-per-node", gpus)).rpartition(":")[2]
    ranks = max(1, int(share)) if share.isdigit() else 1
    if cpus is not None:
        flags["cpus-per-gpu"] = [str(max(1, cpus // ranks))]
    if cpus is not None and cpus % ranks:
        notes.append(f"{ranks} ranks cannot share {cpus} CPUs per node equally: {cpus % ranks} are not asked for")
    return flags


def _gpus(asked: int | None, processes: int | None, line: int, notes: list[str], *, is_settled: bool) -> int:
    """Return the GPUs per node. Raises UserError if they are not as many as the processes."""
    if asked is None:
        gpus = processes if processes is not None and processes > 1 else 0
        each = f"each of the {gpus} processes per node of line {line} gets one"
        effect = each if gpus else "one rank per node uses its CPUs (else type --gpus-per-node N)"
        notes += [] if is_settled else [f"no line asks for GPUs: {effect}"]
        return gpus
    if processes not in {None, asked} and not is_settled:
        count = "1 process" if processes == 1 else f"{processes} processes"
        raise UserError(
            f"line {line}: the program starts {count} per node, which has {asked} GPU{'s' * (asked != 1)}, and a run "
            f"has one rank per GPU: type --gpus-per-node {asked} or {processes} after the file"
        )
    return asked
