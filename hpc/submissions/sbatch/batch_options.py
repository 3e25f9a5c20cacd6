"""Turns the options of sbatch and srun in a batch script into our flags. Pure; runs on the login node."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpc.base.errors import UserError
from hpc.base.text import did_you_mean
from hpc.base.units import TimeLimit
from hpc.run.spec import MANAGED_SBATCH
from hpc.submissions.sbatch.sbatch_advice import ALONE, LETTERS, WITH_VALUE

_LEFT_OUT = {
    **{name: MANAGED_SBATCH[name].removesuffix(": leave it out") for name in (
        "output", "error", "open-mode", "requeue", "no-requeue", "no-kill", "wait", "test-only",
    )},
    **dict.fromkeys(("quiet", "verbose", "parsable"), "no effect on the job"),
}  # fmt: skip
_GPU_OPTIONS = ("gres", "gpus-per-node", "gpus-per-task", "gpus")
COUNTS = {"nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "cpus-per-task", *_GPU_OPTIONS}
"""The options from which the number of ranks and their share of a node follow."""
# The options whose words Slurm puts into a variable of the same name.
_TOLD = (
    "gpus", "gpus-per-node", "gpus-per-task", "cpus-per-gpu", "cpus-per-task", "ntasks-per-node", "ntasks-per-gpu",
)  # fmt: skip
_OURS = {
    **{name: name for name in ("account", "constraint", "cpus-per-gpu", "exclude", "mem", "partition", "qos", "time")},
    "time-min": "time-min", "job-name": "name",
}  # fmt: skip
_KNOWN = {*ALONE, *WITH_VALUE, *MANAGED_SBATCH, *_LEFT_OUT, *COUNTS}
_SIGNAL = re.compile(r"(?:SIG)?(?P<name>[A-Z]+\d?)(?:@(?P<seconds>\d+))?")
_MEMORY_OPTIONS = {"mem", "mem-per-cpu", "mem-per-gpu"}  # sbatch accepts only one of these


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of sbatch or srun, with the line of the file in which it stands."""

    name: str
    value: str
    line: int

    def __str__(self) -> str:
        return f"--{self.name}={self.value}" if self.value else f"--{self.name}"

    @property
    def number(self) -> int:
        """The value, which must be a whole number. Else raises UserError."""
        if not self.value.isdigit() or not int(self.value):
            raise self.error(": write a whole number")
        return int(self.value)

    def error(self, text: str) -> UserError:
        """Return an error about this option."""
        return UserError(f"line {self.line}: {self}{text}")


def read_directive(text: str, line: int) -> Iterator[Option]:
    """Yield the options of a `#SBATCH` line.

    Raises:
        UserError: sbatch lacks such an option, or would take a variable for its name.
    """
    # Also sbatch takes an unquoted # for the beginning of a comment, even within a word.
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise UserError(f"line {line}: a quote in #SBATCH{text} is not closed: close it") from error
    if "$" in (joined := " ".join(words)) or "`" in joined:
        raise UserError(f"line {line}: Slurm expands no variables in #SBATCH lines: write the value in {joined}")
    for option in read_options(words, line):
        name = "ntasks-per-node" if option.name == "tasks-per-node" else option.name
        if name not in _KNOWN:
            hint = did_you_mean(name, _KNOWN, "delete it, or submit this file with sbatch", 1)
            raise option.error(f" is no option of sbatch that hpc submit knows: {hint}")
        yield Option(name=name, value=option.value, line=line)


def read_options(words: Sequence[str], line: int) -> list[Option]:
    """Return the options of a command line without its program. A word without a dash is the value of the last one."""
    options = list[Option]()
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        if not word.startswith("-"):
            if not options:
                advice = MANAGED_SBATCH.get(word, "write --NAME=VALUE")
                raise UserError(f"line {line}: {word!r} is not an option that a run can have: {advice}")
            name, value = options.pop().name, word
        elif not word.startswith("--"):
            name, value = LETTERS.get(word[:2], word[:2]), word[2:].removeprefix("=")
        options.append(Option(name=name, value=value, line=line))
    return options


# --- the layout of a job ---


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the tasks of a job run, as sbatch and srun understand their options."""

    nodes: str
    """A number, or a range such as 2:4."""
    tasks: int = 1
    """Tasks per node."""
    gpus: int | None = None
    """GPUs per node; None if no option asks for GPUs."""
    gpu_type: str = ""
    cpus_per_task: int | None = None


def layout_of(options: Mapping[str, Option], typed_nodes: str | None = None) -> Layout:
    """Return the layout of a job with these options. `typed_nodes` is used if no option says the number of nodes.

    Raises:
        UserError: two options disagree, or leave the number of nodes to Slurm.
    """
    nodes_option, ntasks, per_node = (options.get(name) for name in ("nodes", "ntasks", "ntasks-per-node"))
    if nodes_option:
        nodes = nodes_option.value.replace("-", ":")
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", nodes):
            raise nodes_option.error(": write a number such as 2, or a range such as 2-4")
    elif ntasks and not typed_nodes and ntasks.number > 1:
        if per_node is None:
            raise ntasks.error(" leaves the number of nodes to Slurm: add --nodes N")
        nodes = str(-(-ntasks.number // per_node.number))
    else:
        nodes = typed_nodes or "1"
    # With --ntasks, sbatch takes --ntasks-per-node for a maximum.
    tasks = _share(ntasks, ntasks.number, nodes) if ntasks else per_node.number if per_node else 1
    gpus, gpu_type = _gpus(options, nodes, tasks)
    if (per_gpu := options.get("ntasks-per-gpu")) and gpus and not per_node and not ntasks:
        tasks = per_gpu.number * gpus
    cpus = options["cpus-per-task"].number if "cpus-per-task" in options else None
    return Layout(nodes=nodes, tasks=tasks, gpus=gpus, gpu_type=gpu_type, cpus_per_task=cpus)


def variables(options: Mapping[str, Option], layout: Layout) -> dict[str, str]:
    """Return the variables that Slurm sets for a job, and that have other values in the job of a run.

    Most are empty if no option asks for what they say.
    """
    nodes = int(layout.nodes) if layout.nodes.isdigit() else None
    tasks = nodes * layout.tasks if nodes and options.keys() & {"ntasks", "ntasks-per-node"} else None
    values = {
        "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks,
        "SLURM_GPUS_ON_NODE": layout.gpus,
        **{f"SLURM_{name.replace('-', '_').upper()}": options[name].value if name in options else None
           for name in _TOLD},
    }  # fmt: skip
    if tasks:
        values["SLURM_TASKS_PER_NODE"] = f"{layout.tasks}(x{nodes})" if nodes != 1 else layout.tasks
    if "job-name" in options:
        values["SLURM_JOB_NAME"] = options["job-name"].value
    return {name: "" if value is None else str(value) for name, value in values.items()}


def _share(total: Option, count: int, nodes: str) -> int:
    """Return a node's share of a number for the whole job. Raises UserError if there is no equal share."""
    if not nodes.isdigit() or count % int(nodes):
        raise total.error(f" is not the same number on each of {nodes} nodes: write it per node")
    return count // int(nodes)


def _gpus(options: Mapping[str, Option], nodes: str, tasks: int) -> tuple[int | None, str]:
    """Return the number of GPUs per node, None if no option asks for any, and their type."""
    counts, gpu_type = dict[int, Option](), ""
    for option in (options[name] for name in _GPU_OPTIONS if name in options):
        items = [item.partition("(")[0].split(":") for item in option.value.split(",")]
        if option.name == "gres":
            items = [item[1:] or ["1"] for item in items if item[0] in {"gpu", "gres/gpu"}]
        for item in items[:1]:
            *kind, number = item if item[-1].isdigit() else [*item, "1"]
            if len(items) > 1 or len(kind) > 1:
                raise option.error(" asks for several types of GPUs: hpc submit takes one type")
            count = _share(option, int(number), nodes) if option.name == "gpus" else int(number)
            counts[count * (tasks if option.name == "gpus-per-task" else 1)] = option
            gpu_type = "".join(kind) or gpu_type
    if len(counts) > 1:
        one, other = list(counts.values())[:2]
        raise one.error(f" and --{other.name}={other.value} ask for other numbers of GPUs per node: leave one out")
    return next(iter(counts), None) or None, gpu_type


# --- flags ---


def flags_of(options: Mapping[str, Option], notes: list[str]) -> dict[str, list[str]]:
    """Return our flags for the options that need no knowledge of the program. `notes` gets what is left out.

    Raises:
        UserError: there is no flag for an option.
    """
    flags = dict[str, list[str]]()
    for name, option in options.items():
        if name == "gres":
            others = [item for item in option.value.split(",") if not re.match(r"(gres/)?gpu\b", item)]
            if others:
                flags.setdefault("sbatch", []).append(f"gres={','.join(others)}")
        elif name in _OURS:
            flags[_OURS[name]] = [_clear_value(option)]
        elif name == "signal":
            flags |= _signal(option)
        elif name in _LEFT_OUT or (name == "export" and option.value == "ALL"):
            notes.append(
                f"left out line {option.line}: {option}: {_LEFT_OUT.get(name, 'every run has the environment')}"
            )
        elif name in (WITH_VALUE | ALONE) - COUNTS:
            flags.setdefault("sbatch", []).append(str(option).removeprefix("--"))
        elif name not in COUNTS | {"chdir"}:
            raise option.error(f": {MANAGED_SBATCH.get(name, 'hpc submit has no flag for it, so delete it')}")
    return flags


def _clear_value(option: Option) -> str:
    """Return a value in a form in which nobody can take minutes for hours, or megabytes for gigabytes."""
    if option.name == "mem":
        return f"{option.value}M" if option.value.isdigit() and option.value != "0" else option.value
    if not option.name.startswith("time") or "-" in option.value or option.value.count(":") == 2:
        return option.value
    try:
        return str(TimeLimit.parse_as_slurm(option.value))
    except ValueError as error:
        raise UserError(f"line {option.line}: --{option.name} {error}") from error


def _signal(option: Option) -> dict[str, list[str]]:
    """Return the flags for --signal. Without `B:`, Slurm signals the steps, as Torchrelay does with its ranks."""
    match = _SIGNAL.fullmatch(option.value.upper())
    if match is None:
        raise option.error(" does not signal the ranks: write --signal=USR1@120, and let train.py handle it")
    return {"stop-signal": [match["name"]], "signal-before": [f"{match['seconds'] or 60}s"]}


def without_typed(flags: Mapping[str, list[str]], typed: Mapping[str, object]) -> dict[str, list[str]]:
    """Return the flags of a file that no flag typed after it replaces. --setup adds to those of the file."""
    options = typed.get("sbatch")
    replaced = {str(option).partition("=")[0] for option in (options if isinstance(options, list) else [])}
    if _MEMORY_OPTIONS & {*typed, *replaced}:
        replaced |= _MEMORY_OPTIONS
    kept = {name: values for name, values in flags.items() if name not in typed or name in {"setup", "sbatch"}}
    kept["sbatch"] = [option for option in kept.get("sbatch", []) if option.partition("=")[0] not in replaced]
    if "mem" in replaced:
        kept.pop("mem", None)
    return kept
