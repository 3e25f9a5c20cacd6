"""Translates a batch script that starts a training into a command line of `hpc submit`. Pure; runs on the login node.

What the translation does not understand, it refuses with the number of the line. It reads the statements in their order:
a variable has the value that it has at this place of the script.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc.base.errors import UserError
from hpc.submissions.sbatch.batch_file import directives, is_login_shell
from hpc.submissions.sbatch.batch_options import (
    LAYOUT_VARIABLES,
    Layout,
    flags_of,
    layout_of,
    read_directive,
    without_typed,
)
from hpc.submissions.sbatch.launch_line import Launch, ShellText, is_launcher, read_launch, without_srun
from hpc.submissions.sbatch.shell_lines import Command, Statement, expand, statements

# Commands that change the environment of the ranks, or limits that they inherit.
_SETUP = {"module", "ml", "source", ".", "conda", "mamba", "micromamba", "eval", "export", "unset", "ulimit", "umask"}
# Commands that only print something, or that have no meaning for a run.
_PRINTS = {
    "echo", "printf", "date", "hostname", "nvidia-smi", "rocm-smi", "pwd", "env", "printenv", "which", "type", "whoami",
    "id", "uname", "lscpu", "free", "df", "du", "ls", "cat", "scontrol", "squeue", "sacct", "sstat", "seff", "wait", "sleep", "true",
    ":", "set", "shopt", "nvcc", "numactl", "ibstat", "ip", "ifconfig", "uptime", "top", "ps", "nproc",
}  # fmt: skip
_FILTERS = {"head", "tail", "grep", "sort", "uniq", "wc", "cut", "tr", "awk", "sed"}
_AFTER_PROGRAM = {"exit", "deactivate", "conda", "module", "ml"}
_NOT_UNDERSTOOD = {
    **dict.fromkeys(("for", "while", "until", "select"), "is a loop: submit a run for each turn, or write the lines out"),
    **dict.fromkeys(("if", "case", "[", "[[", "test"), "is a condition: delete it, and keep the lines that apply"),
    **dict.fromkeys(("function", "{", "((", "let", "local"), "is more than a list of commands: write the commands alone"),
    **dict.fromkeys(("cp", "rsync", "tar", "unzip", "sbcast", "unsquashfs"),
                    "copies data to the node: delete it, and type --data PATH, which has every node copy it"),
    **dict.fromkeys(("pip", "pip3", "virtualenv", "uv"),
                    "makes an environment in the job: make it once on shared storage, and type --python ENV/bin/python"),
    "trap": "handles a signal: delete it, because the ranks get the signal, and the run continues by itself",
    "exit": "ends the script: delete it",
    "sbatch": "submits another job: use hpc submit --after-ok NAME",
}  # fmt: skip
# Variables of the rendezvous, which torchrun sets up by itself.
_RENDEZVOUS = re.compile(
    r"(MASTER|MAIN|HEAD)_?(NODE|PROCESS|ADDR|ADDRESS|PORT|IP|HOST).*|.*RDZV.*|WORLD_?SIZE|((NODE|LOCAL|GROUP|MACHINE|GLOBAL)_)?RANK|"
    r"NODES|NODES_?(ARRAY|LIST)|HOST(NAME|LIST)S?|LOCAL_WORLD_SIZE", re.IGNORECASE
)  # fmt: skip
_ABOUT_NODES = re.compile(r"scontrol\s+show\s+host|\bSLURM_(JOB_)?NODELIST\b|\bhostname\b|SLURMD_NODENAME")
_ASSIGNMENT = re.compile(r"(\w+)(?:\[[^]]*\])?\+?=(.*)", re.DOTALL)
# A line of --setup that depends on the directory in which it runs.
_RELATIVE = re.compile(r"(source|\.)\s+[\"']?[^/~$\"'\s]|>|cd ")
_PER_TASK = re.compile(r"\bSLURM_(PROCID|LOCALID|NODEID)\b")
_COUNT = re.compile(r"'[^']*'|\\.|\$(?:(SLURM_\w+)|\{(SLURM_\w+)(?::-([^}]*))?\})")
# Variables of the shell that differ in the job.
_OF_THE_JOB = {"TMPDIR", "RANDOM", "HOSTNAME", "SECONDS", "BASH_SOURCE", "LINENO", "EPOCHSECONDS", "SHLVL", "PPID", "0"}
_INSTEAD = {
    "SLURM_JOB_ID": "write {run_dir}, the run's own directory", "SLURM_JOBID": "write {run_dir}, the run's own directory",
    "SLURM_ARRAY_TASK_ID": "submit one run per setting", "TMPDIR": "write {data}, the node's copy of --data",
    "SLURM_TMPDIR": "write {data}, the node's copy of --data",
}  # fmt: skip
# Stands in a word for what is known only in the job. The number is that of the reason.
_UNKNOWN = re.compile("\0(\\d+)\0")


@dataclass(frozen=True, kw_only=True)
class SetupLine:
    """A line of the script that becomes --setup."""

    line: int
    text: str
    sets: str | None = None
    """The name of the variable that it sets without exporting it; None for other lines."""


@dataclass(frozen=True, kw_only=True)
class Translation:
    """What `hpc submit` is to do in place of a batch script."""

    flags: dict[str, list[str]]
    """The values of each flag."""
    launch: Launch
    setup: tuple[SetupLine, ...]
    directory: Path
    """The directory in which to type `hpc submit`."""
    notes: tuple[str, ...]
    """What was left out, and why."""

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
        text: the text; `read_batch_file` has checked it.
        directory: the directory in which the user submits.
        environment: the variables of the user's shell, which sbatch passes on to the job.
        typed: the flags that the user has typed after the file.

    Raises:
        UserError: a line is not understood, or lines contradict each other.
    """
    typed = typed or {}
    read, ignored = directives(text)
    notes = list[str]()
    options = {option.name: option for number, line in read for option in read_directive(line, number)}
    flags = flags_of(options, notes)
    notes += [
        f"line {number}: Slurm ignores #SBATCH{line} after the first command: move it up if you want it"
        for number, line in ignored
    ]
    batch = layout_of(options, str(typed["nodes"]) if "nodes" in typed else None)
    if chdir := options.get("chdir"):
        directory = directory / chdir.value
    reader = _Reader(directory, environment, {**environment, **batch.variables, "SLURM_SUBMIT_DIR": str(directory)})
    if is_login_shell(text):
        reader.setup += [SetupLine(line=1, text="source /etc/profile || true"),
                         SetupLine(line=1, text="[ ! -r ~/.bash_profile ] || source ~/.bash_profile || true")]  # fmt: skip
    reader.read(statements(text))
    if reader.launch is None:
        raise UserError("no line starts a training: write srun python train.py, or torchrun train.py")
    launch, setup = reader.launch, reader.used_setup()
    launchers = ["srun"] * (launch.step is not None) + [launch.python] * (not launch.starts_one_each)
    if launchers:
        reader.notes.append(
            f"line {reader.launch_line}: {' '.join(launchers)}: hpc submit starts the ranks, one per GPU"
        )
    step = {option.name: option for option in launch.step or ()}
    layout = layout_of({**options, **{name: option for name, option in step.items()}}, batch.nodes)
    flags = {**_resources(layout, launch, reader.launch_line, typed, notes), **flags}
    if launch.container:
        flags["container"] = [launch.container]
    setup += [SetupLine(line=reader.launch_line, text=line) for line in launch.exports]
    if setup:
        flags["setup"] = [line.text for line in setup]
    return Translation(
        flags=without_typed(flags, typed), launch=launch, setup=tuple(setup), directory=reader.directory,
        notes=(*notes, *reader.notes),
    )  # fmt: skip


def _resources(
    layout: Layout, launch: Launch, line: int, typed: Mapping[str, object], notes: list[str]
) -> dict[str, list[str]]:
    """Return the flags for the nodes, and the GPUs and CPUs of each. Raises UserError if a rank has not one GPU."""
    nodes, where = layout.nodes, f"line {line}"
    if launch.step is None and nodes != "1":
        raise UserError(f"{where}: without srun, the program starts on one of {nodes} nodes: write srun before it")
    tasks = layout.tasks if launch.step is not None else 1
    if not launch.starts_one_each and tasks > 1:
        raise UserError(f"{where}: srun starts {tasks} launchers per node: write srun --ntasks-per-node=1")
    gpus, processes = layout.gpus, tasks if launch.starts_one_each else launch.processes
    if launch.total is not None and nodes.isdigit():
        processes = launch.total // int(nodes)
    if gpus is None and processes is not None and processes > 1:
        gpus = processes
        notes.append(f"{where}: no option asks for GPUs, and the node has {processes} processes: one GPU for each")
    elif gpus is None:
        gpus = 0
        notes.append("no line asks for GPUs: the ranks use CPUs, one rank per node; --gpus-per-node N for N GPUs")
    elif processes not in {None, gpus} and "gpus-per-node" not in typed:
        raise UserError(
            f"{where}: the program starts {processes} process{'es' * (processes != 1)} per node, which has {gpus} GPUs, "
            f"and a run has one rank per GPU: type --gpus-per-node {gpus} or --gpus-per-node {processes} after the file"
        )
    flags = {"nodes": [nodes], "gpus-per-node": [f"{layout.gpu_type}:{gpus}" if layout.gpu_type else str(gpus)]}
    if layout.cpus_per_task is not None:
        cpus, typed_gpus = layout.cpus_per_task * tasks, str(typed.get("gpus-per-node", gpus)).rpartition(":")[2]
        ranks = int(typed_gpus) or 1 if typed_gpus.isdigit() else 1
        flags["cpus-per-gpu"] = [str(max(1, cpus // ranks))]
        if cpus % ranks:
            notes.append(
                f"{cpus} CPUs per node are not the same number for each of {ranks} ranks: {cpus // ranks} each"
            )
    return flags


class _Reader:
    """Reads statements, and remembers what they do."""

    def __init__(self, directory: Path, environment: Mapping[str, str], values: Mapping[str, str]) -> None:
        self.setup, self.notes = list[SetupLine](), list[str]()
        self.launch: Launch | None = None
        self.launch_line = 0
        self.directory = self._start = directory
        self._exported = set(environment)
        self._values, self._reasons = dict(values), list[str]()
        self._left_out = set[str]()
        self._in_step = False

    def read(self, lines: Iterator[Statement]) -> None:
        """Read statements. Raises UserError at the first one that is not understood."""
        for statement in lines:
            try:
                self._read(statement)
            except UserError as error:
                text = str(error)
                raise UserError(text if text.startswith("line ") else f"line {statement.line}: {text}") from error

    def used_setup(self) -> list[SetupLine]:
        """Return the lines of --setup without variables that nothing but the program's command line used."""
        kept = list[SetupLine]()
        for line in reversed(self.setup):
            if line.sets is None or any(re.search(rf"\b{line.sets}\b", later.text) for later in kept):
                kept.insert(0, line)
        return kept

    def _read(self, statement: Statement) -> None:
        commands, line = statement.commands, statement.line
        operators = {command.operator for command in commands[:-1]}
        if commands[-1].operator == "&":
            raise UserError(f"{_short(statement.text)} runs in the background (&): delete & and wait")
        if any(re.match(r"\d*<<(?!\()", redirect) for command in commands for redirect in command.redirects):
            raise UserError("a here-document (<<) is not understood: write its text into a file")
        names = [command.words[0] if command.words else "" for command in commands]
        if operators <= {"&&"}:
            for command in commands:
                self._command(command, line, statement.text if len(commands) == 1 else _text(command))
        elif operators == {"||"} and names[-1] in {"exit", "true", ":", "echo"}:
            # Each line of --setup must succeed: an exit says nothing more.
            ends = names[-1] == "exit"
            self._command(commands[0], line, _text(commands[0]) if ends else statement.text)
        elif operators <= {"|", "|&"} and is_launcher(names[0]) and set(names[1:]) == {"tee"}:
            self._command(commands[0], line, _text(commands[0]))
            self._note(line, _text(commands[-1]), "hpc logs prints the output")
        elif operators <= {"|", "|&"} and names[0] in _PRINTS and set(names[1:]) <= _FILTERS | _PRINTS:
            self._note(line, statement.text, "only prints")
        else:
            raise UserError(
                f"{_short(statement.text)}: hpc submit does not understand {' '.join(sorted(operators))} here: delete it"
            )

    def _command(self, command: Command, line: int, text: str) -> None:
        """Read a simple command. `text` is the command as --setup would have it."""
        words, assigned = command.words, 0
        while assigned < len(words) and _ASSIGNMENT.fullmatch(words[assigned]):
            assigned += 1
        if assigned == len(words) or words[0] in {"export", "readonly", "declare", "typeset"}:
            self._assign(words, line, text)
            return
        for word in words[:assigned]:  # VAR=value before a program
            self._assign(("export", word), line, f"export {word}")
        words = words[assigned:]
        name = words[0]
        fields = [field for word in words for field in self._fields(word)]
        program = without_srun(fields, line) if fields else []
        if not fields or name.startswith("(") or name.endswith("()"):
            raise UserError(
                f"{_short(text)}: hpc submit understands no functions and subshells: write the commands alone"
            )
        if _is_print(program):
            self._print(command, line, text)
        elif self.launch is not None and name in _AFTER_PROGRAM:
            self._note(line, text, "comes after the program")
        elif name in _SETUP and fields[1:2] != ["run"] and self.launch is None:
            self._add_setup(line, text)
        elif name in _NOT_UNDERSTOOD:
            raise UserError(f"{_short(text)} {_NOT_UNDERSTOOD[name]}")
        elif is_launcher(fields[0]):
            self._launch(fields, line, text)
            if command.redirects:
                self._note(line, " ".join(command.redirects), "hpc logs prints the output")
        elif self.launch is not None:
            raise UserError(
                f"{_short(text)} comes after the program of line {self.launch_line}: delete it, or do it by hand"
            )
        elif name == "cd":
            self._change_directory(fields[1:], line)
        elif name == "mkdir":
            self._make_directories(fields, line, text)
        elif name in {"mapfile", "readarray", "read"} and _ABOUT_NODES.search(text):
            self._left_out.update(word for word in words[1:] if re.fullmatch(r"\w+", word))
            self._note(line, text, "torchrun finds the nodes by itself")
        else:
            raise UserError(
                f"{_short(text)}: hpc submit does not know what {name} is for: delete the line, or type it as --setup after "
                "deleting it if it must run before the training on the first node"
            )

    # --- variables ---

    def _value_of(self, name: str) -> str | None:
        if name == "PWD":
            return str(self.directory)
        if name.isdigit():
            return self._unknown(f"${name} is an argument of the batch script, and sbatch passes none: write its value")
        if name in self._values and name not in _OF_THE_JOB:
            return self._values[name]
        if name in _OF_THE_JOB or (name.startswith("SLURM") and name not in LAYOUT_VARIABLES):
            return self._unknown(f"${name} is known only in the job: {_INSTEAD.get(name, 'write its value')}")
        return None

    def _unknown(self, reason: str) -> str:
        self._reasons.append(reason)
        return f"\0{len(self._reasons) - 1}\0"

    def _fields(self, word: str) -> list[str]:
        return expand(word, self._value_of, self._unknown)

    def _check_is_known(self, *words: str) -> None:
        """Raise UserError if the value of a word is known only in the job."""
        for word in words:
            if match := _UNKNOWN.search(word):
                raise UserError(self._reasons[int(match[1])])

    def _assign(self, words: Sequence[str], line: int, text: str) -> None:
        is_export = words[0] == "export"
        kept = list[str]()
        for word in words:
            if match := _ASSIGNMENT.fullmatch(word):
                name, written = match.groups()
                is_plain = word.startswith(f"{name}=") and not written.startswith("(")
                self._values[name] = (
                    "".join(expand(written, self._value_of, self._unknown, splits=False))
                    if is_plain
                    else self._unknown(f"{word} is not a plain value: write its value where it is used")
                )
                is_of_rendezvous = _RENDEZVOUS.fullmatch(name) or _ABOUT_NODES.search(written)
                if is_of_rendezvous and _UNKNOWN.search(self._values[name]):
                    self._values[name] = self._unknown(f"${name} is a part of the rendezvous, which torchrun sets up: "
                                                       "have the script read MASTER_ADDR and MASTER_PORT, or use env://")  # fmt: skip
                if is_of_rendezvous or ("$" in written and self._left_out & set(re.findall(r"\w+", written))):
                    self._left_out.add(name)
                    self._note(line, word if not is_export else f"export {word}", "torchrun sets up the rendezvous")
                    continue
                if self._in_step and _PER_TASK.search(written):
                    raise UserError(f"{word} differs in each task: have the script read LOCAL_RANK and RANK")
            if is_export:
                self._exported.add(match[1] if match else word)
            kept.append(word)
        names = [word for word in kept if word[0] != "-" and word != words[0] or _ASSIGNMENT.fullmatch(word)]
        if not names:
            return
        text = text if len(kept) == len(words) else " ".join(kept)
        first = re.split(r"\W", names[0])[0]
        alone = None if is_export or len(names) > 1 or first in self._exported else first
        self.setup.append(SetupLine(line=line, text=self._with_counts(text), sets=alone))

    def _with_counts(self, text: str) -> str:
        """Replace Slurm's numbers of tasks and CPUs, which are those of the batch script and not those of our job."""

        def count(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            return self._values.get(name) or match[3] or "" if name in LAYOUT_VARIABLES else match[0]

        return _COUNT.sub(count, text)

    # --- commands ---

    def _add_setup(self, line: int, text: str) -> None:
        self.setup.append(SetupLine(line=line, text=self._with_counts(text)))

    def _note(self, line: int, text: str, reason: str) -> None:
        self.notes.append(f"line {line}: {_short(text)}: {reason}")

    def _print(self, command: Command, line: int, text: str) -> None:
        writes = [
            target for target in command.redirects if not re.match(r"\d*>&|.*/dev/(null|stderr|stdout)$|\d*<", target)
        ]
        if writes and self.launch is None and command.words[0] != "srun":
            self._add_setup(line, text)
        elif writes:
            raise UserError(f"{_short(text)} writes a file: delete it")
        else:
            self._note(line, text, "changes nothing for the ranks")

    def _change_directory(self, fields: Sequence[str], line: int) -> None:
        target = next(iter(fields), str(Path.home()))
        self._check_is_known(target)
        directory = Path(os.path.normpath(self.directory / target))
        if not directory.is_dir():
            raise UserError(f"cd {target}: there is no such directory here: write one that this machine has, too")
        if directory != self.directory and any(map(_RELATIVE.search, (line.text for line in self.setup))):
            before = (
                []
                if self.directory != self._start
                else [SetupLine(line=line, text=f"cd {shlex.quote(str(self.directory))}")]
            )
            self.setup = [*before, *self.setup, SetupLine(line=line, text=f"cd {shlex.quote(str(directory))}")]
        self.directory = directory

    def _make_directories(self, fields: Sequence[str], line: int, text: str) -> None:
        places = [field for field in fields[1:] if not field.startswith("-")]
        if all((self.directory / place).is_dir() for place in places):
            self._note(line, text, "the directory exists")
        elif all(place.startswith("/") for place in places):
            self._add_setup(line, text)
        else:
            self._note(line, text, "type it before hpc submit if the training needs the directory")

    def _launch(self, fields: Sequence[str], line: int, text: str) -> None:
        if self.launch is not None:
            raise UserError(
                f"{_short(text)} is a second program after line {self.launch_line}: submit each as a run of its own"
            )
        launch = read_launch(fields, line)
        if isinstance(launch, ShellText):
            self._check_is_known(launch.text)
            self._in_step = launch.step is not None
            self.read(statements(launch.text, line))
            self._in_step = False
            if self.launch is None:
                raise UserError(f"{_short(text)} starts no training: write srun python train.py")
            if launch.step is not None:
                self.launch = replace(self.launch, step=(*launch.step, *(self.launch.step or ())))
            return
        self._check_is_known(*launch.script, *launch.exports, launch.python, launch.container or "")
        self.launch, self.launch_line = launch, line


def _is_print(words: Sequence[str]) -> bool:
    """Return whether a command only prints something."""
    name, *rest = words or [""]
    if re.fullmatch(r"python[\d.]*", name):
        return rest[:1] in (["--version"], ["-V"]) or (rest[:1] == ["-c"] and "print(" in " ".join(rest))
    return name in _PRINTS and not (name == "env" and any(is_launcher(word) for word in rest))


def _text(command: Command) -> str:
    return " ".join((*command.words, *command.redirects))


def _short(text: str) -> str:
    """Return the beginning of a line of the script, for a message."""
    first = " ".join(text.split())
    return f"`{first}`" if len(first) <= 60 else f"`{first[:57]}...`"  # noqa: PLR2004
