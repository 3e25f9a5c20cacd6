"""Turns the options of sbatch and srun in a batch script into our flags. Pure; runs on the login node."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hpc.base.errors import UserError
from hpc.base.text import did_you_mean
from hpc.base.units import TimeLimit
from hpc.run.spec import MANAGED_SBATCH
from hpc.submissions.sbatch.sbatch_advice import ALONE, LETTERS, WITH_VALUE

# Further options that have no value, or only one after `=`.
_NO_VALUE = {
    *ALONE, "get-user-env", "hetjob", "nice", "no-kill", "no-requeue", "parsable", "propagate", "quiet", "requeue",
    "test-only", "verbose", "wait",
}  # fmt: skip
_IN_LOG = "the run's directory has the logs"
_LEFT_OUT = {
    "output": _IN_LOG, "error": _IN_LOG, "open-mode": _IN_LOG, "requeue": "every run is requeued",
    "no-requeue": "every run is requeued until hpc cancel; --start-once if the script must not start twice",
    "no-kill": "set for several nodes", "get-user-env": "a run has this shell's environment",
    "wait": "type --wait after the file", "test-only": "type --dry-run after the file", "quiet": "no effect on the job",
    "verbose": "no effect on the job", "parsable": "no effect on the job",
}  # fmt: skip
COUNTS = {
    "nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "cpus-per-task", "gpus", "gpus-per-node", "gpus-per-task",
    "gres",
}  # fmt: skip
"""The options from which the number of ranks and their share of a node follow."""
_SAME = {"account", "constraint", "cpus-per-gpu", "exclude", "mem", "partition", "qos", "time", "time-min"}
_SYNONYMS = {"tasks-per-node": "ntasks-per-node"}
_KNOWN = sorted({*_NO_VALUE, *WITH_VALUE, *MANAGED_SBATCH, *_LEFT_OUT, *COUNTS, *_SYNONYMS, "input"})
_SIGNAL = re.compile(r"(?P<to>[A-Z]+:)?(?:SIG)?(?P<name>[A-Z]+\d?)(?:@(?P<seconds>\d+))?")
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
            raise UserError(f"line {self.line}: {self} has no whole number: write one")
        return int(self.value)


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
    for word in words:
        if "$" in word or "`" in word:
            raise UserError(f"line {line}: Slurm expands no variables in #SBATCH lines: write the value in {word}")
    options, rest = read_options(words, line, LETTERS, _NO_VALUE)
    if rest:
        advice = MANAGED_SBATCH.get(rest[0], "write --NAME=VALUE")
        raise UserError(f"line {line}: {rest[0]!r} is not an option of sbatch that a run can have: {advice}")
    for option in options:
        yield Option(name=_full_name(option), value=option.value, line=line)


def read_options(
    words: Sequence[str], line: int, letters: Mapping[str, str], no_value: set[str]
) -> tuple[list[Option], Sequence[str]]:
    """Return the options at the beginning of a command line, and the words after them.

    Args:
        words: the command line without the name of the command.
        line: its line in the file.
        letters: the long names of the short options.
        no_value: the long names of the options without a value, or with one that can only follow `=`.
    """
    options, at = list[Option](), 0
    while at < len(words) and words[at].startswith("-") and words[at] not in {"-", "--"}:
        word, at = words[at], at + 1
        if word.startswith("--"):
            name, separator, value = word.removeprefix("--").partition("=")
        else:
            name, separator, value = letters.get(word[:2], word[:2]), "", word[2:].removeprefix("=")
        if not separator and not value and name not in no_value:
            if at == len(words):
                raise UserError(f"line {line}: {word} has no value")
            value, at = words[at], at + 1
        options.append(Option(name=name, value=value, line=line))
    return options, words[at:]


def _full_name(option: Option) -> str:
    """Return the long name of an option that may be shortened, as getopt accepts: `part` for `partition`."""
    if option.name in _SYNONYMS:
        return _SYNONYMS[option.name]
    matches = [name for name in _KNOWN if name.startswith(option.name)]
    if option.name in matches or len(matches) == 1:
        return option.name if option.name in matches else matches[0]
    hint = did_you_mean(option.name, _KNOWN, "delete it, or submit this file with sbatch", 1)
    raise UserError(f"line {option.line}: hpc submit knows no option {option} of sbatch: {hint}")


LAYOUT_VARIABLES = {
    "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_JOB_NAME",
}  # fmt: skip
"""Slurm's variables whose values follow from the options."""


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
    variables: Mapping[str, str] = field(default_factory=dict)
    """Slurm's variables for this layout."""

    def cpus(self, *, one_each: bool) -> int | None:
        """Return the CPUs per node; None if no option asks for them.

        `one_each` tells whether each task is a process of the training. Else several tasks only ask for CPUs.
        """
        if self.cpus_per_task is None and (one_each or self.tasks == 1):
            return None
        return self.tasks * (self.cpus_per_task or 1)


def layout_of(options: Mapping[str, Option], typed_nodes: str | None = None) -> Layout:
    """Return the layout of a job with these options. `typed_nodes` is used if no option says the number of nodes.

    Raises:
        UserError: two options disagree, or leave the number of nodes to Slurm.
    """
    ntasks, per_node = options.get("ntasks"), options.get("ntasks-per-node")
    if nodes_option := options.get("nodes"):
        nodes = nodes_option.value.replace("-", ":")
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", nodes):
            raise UserError(
                f"line {nodes_option.line}: {nodes_option}: write a number such as 2, or a range such as 2-4"
            )
    elif typed_nodes:
        nodes = typed_nodes
    elif ntasks and per_node:
        nodes = str(-(-ntasks.number // per_node.number))
    elif ntasks and ntasks.number > 1:
        raise UserError(f"line {ntasks.line}: {ntasks} leaves the number of nodes to Slurm: add --nodes N")
    else:
        nodes = "1"
    tasks = per_node.number if per_node else _per_node(ntasks, nodes) if ntasks else 1
    if ntasks and per_node and nodes_option and nodes.isdigit() and ntasks.number != int(nodes) * tasks:
        raise UserError(f"line {ntasks.line}: {ntasks}, but line {per_node.line} has {per_node}: leave one out")
    counts = list(_gpu_counts(options, nodes, tasks))
    for (first, _, one), (count, _, other) in pairwise(counts):
        if first != count:
            raise UserError(
                f"line {one.line}: {one} is {first} GPUs per node, but line {other.line} has {other}: leave one out"
            )
    gpus = counts[0][0] if counts else None
    if (per_gpu := options.get("ntasks-per-gpu")) and gpus and not per_node and not ntasks:
        tasks = per_gpu.number * gpus
    cpus = options["cpus-per-task"].number if "cpus-per-task" in options else None
    return Layout(
        nodes=nodes, tasks=tasks, gpus=gpus, gpu_type=next((kind for _, kind, _ in counts if kind), ""),
        cpus_per_task=cpus, variables=_variables(options, nodes, tasks, gpus),
    )  # fmt: skip


def _variables(options: Mapping[str, Option], nodes: str, tasks: int, gpus: int | None) -> dict[str, str]:
    """Return the variables that Slurm sets. Most are set only if an option asks for what they say."""
    number = int(nodes) if nodes.isdigit() else None
    total = number * tasks if number and options.keys() & {"ntasks", "ntasks-per-node"} else None
    values = {
        "SLURM_NNODES": number, "SLURM_JOB_NUM_NODES": number, "SLURM_NTASKS": total, "SLURM_NPROCS": total,
        "SLURM_NTASKS_PER_NODE": tasks if "ntasks-per-node" in options else None,
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"].number if "cpus-per-task" in options else None,
        "SLURM_JOB_NAME": options["job-name"].value if "job-name" in options else None,
        "SLURM_GPUS_ON_NODE": gpus, "SLURM_GPUS_PER_NODE": gpus if "gpus-per-node" in options else None,
    }  # fmt: skip
    return {name: str(value) for name, value in values.items() if value is not None}


def _per_node(total: Option, nodes: str, count: int | None = None) -> int:
    """Return a node's share of an option's number for the whole job. Raises UserError if there is no equal share."""
    count = total.number if count is None else count
    if not nodes.isdigit() or count % int(nodes):
        raise UserError(
            f"line {total.line}: {total} is not the same number on each of {nodes} nodes: write it per node"
        )
    return count // int(nodes)


def _gpu_counts(options: Mapping[str, Option], nodes: str, tasks: int) -> Iterator[tuple[int, str, Option]]:
    """Yield the GPUs per node and their type from each option that asks for GPUs."""
    for name in ("gres", "gpus-per-node", "gpus-per-task", "gpus"):
        if (option := options.get(name)) and (gpus := _gpus(option)):
            count, kind = gpus
            if name == "gpus":
                count = _per_node(option, nodes, count)
            if count:
                yield count * (tasks if name == "gpus-per-task" else 1), kind, option


def _gpus(option: Option) -> tuple[int, str] | None:
    """Return the number and type of the GPUs of an option; None for a --gres without GPUs."""
    items = [item.partition("(")[0].split(":") for item in option.value.split(",")]
    if option.name == "gres":
        items = [item[1:] or ["1"] for item in items if item[0] in {"gpu", "gres/gpu"}]
        if not items:
            return None
    *kind, count = items[0] if items[0][-1].isdigit() else [*items[0], "1"]
    if len(items) > 1 or len(kind) > 1:
        raise UserError(f"line {option.line}: {option} asks for several types of GPUs: hpc submit takes one type")
    return int(count), "".join(kind)


# --- flags ---


def _memory(option: Option) -> str:
    return option.value + "M" * (option.value.isdigit() and option.value != "0")


def _time(option: Option) -> str:
    """Return a time limit in a form in which nobody can take minutes for hours."""
    is_clear = "-" in option.value or option.value.count(":") == 2
    try:
        limit = TimeLimit.parse_as_slurm(option.value)
        return option.value if is_clear else str(limit)
    except ValueError as error:
        raise UserError(f"line {option.line}: --{option.name} {error}") from error


_CONVERTED: dict[str, Callable[[Option], str]] = {"mem": _memory, "time": _time, "time-min": _time}


def flags_of(options: Mapping[str, Option], notes: list[str]) -> dict[str, list[str]]:
    """Return our flags for the options that need no knowledge of the program. `notes` gets what is left out.

    Raises:
        UserError: there is no flag for an option.
    """
    flags = dict[str, list[str]]()
    for name, option in options.items():
        if name in COUNTS:
            others = [item for item in option.value.split(",") if not re.match(r"(gres/)?gpu\b", item)]
            if name == "gres" and others:
                flags.setdefault("sbatch", []).append(f"gres={','.join(others)}")
        elif name in _SAME:
            flags[name] = [_CONVERTED[name](option) if name in _CONVERTED else option.value]
        elif name == "job-name":
            flags["name"] = [option.value]
        elif name == "signal":
            flags |= _signal(option)
        elif name in _LEFT_OUT or (name == "export" and option.value == "ALL"):
            notes.append(
                f"left out line {option.line}: {option}: {_LEFT_OUT.get(name, 'a run has the whole environment')}"
            )
        elif name in WITH_VALUE | ALONE:
            flags.setdefault("sbatch", []).append(str(option).removeprefix("--"))
        elif name != "chdir":
            advice = MANAGED_SBATCH.get(name, "hpc submit has no flag for it, so delete it")
            raise UserError(f"line {option.line}: {option}: {advice}")
    return flags


def _signal(option: Option) -> dict[str, list[str]]:
    """Return the flags for --signal. Without `B:`, Slurm signals the steps, as Torchrelay does with its ranks."""
    match = _SIGNAL.fullmatch(option.value.upper())
    if match is None or match["to"]:
        reason = "signals the batch script, not the ranks" if match else "is not understood"
        raise UserError(f"line {option.line}: {option} {reason}: write --signal=USR1@120, and let train.py handle it")
    return {"stop-signal": [match["name"]], "signal-before": [f"{match['seconds'] or 60}s"]}


def without_typed(flags: Mapping[str, list[str]], typed: Mapping[str, object]) -> dict[str, list[str]]:
    """Return the flags of a file that no flag typed after it replaces. --setup adds to those of the file."""
    given = typed.get("sbatch")
    typed_keys = {str(option).partition("=")[0] for option in (given if isinstance(given, list) else [])}
    if _MEMORY_OPTIONS & {*typed, *typed_keys}:
        typed_keys |= _MEMORY_OPTIONS
    kept = {name: values for name, values in flags.items() if name not in typed or name in {"setup", "sbatch"}}
    kept["sbatch"] = [option for option in kept.get("sbatch", []) if option.partition("=")[0] not in typed_keys]
    if typed_keys & _MEMORY_OPTIONS:
        kept.pop("mem", None)
    return kept
