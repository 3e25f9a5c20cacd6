"""Reads the statements of a batch script in their order, and remembers what they do. Pure; runs on the login node.

A statement becomes a line of --setup, starts the training, is left out because it does nothing for the ranks, or is
refused. A variable has the value that it has at its place in the script.
"""

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc.base.errors import UserError
from hpc.submissions.sbatch.batch_options import COUNTS, LAYOUT_VARIABLES
from hpc.submissions.sbatch.launch_line import Launch, ShellText, is_launcher, read_launch, without_srun
from hpc.submissions.sbatch.shell_lines import Command, Statement, expand, statements

# Commands that change the environment of the ranks, or limits that they inherit.
_SETUP = {"module", "ml", "source", ".", "conda", "mamba", "micromamba", "eval", "unset", "ulimit", "umask"}
# Commands that only print something, or that have no meaning for a run.
_PRINTS = {
    ":", "cat", "date", "df", "du", "echo", "env", "free", "hostname", "ibstat", "id", "ip", "ls", "lscpu", "nproc",
    "nvcc", "nvidia-smi", "printenv", "printf", "ps", "pwd", "rocm-smi", "sacct", "scontrol", "seff", "set", "shopt",
    "sleep", "squeue", "sstat", "true", "type", "uname", "uptime", "wait", "which", "whoami",
}  # fmt: skip
_FILTERS = {"awk", "cut", "grep", "head", "sed", "sort", "tail", "tr", "uniq", "wc"}
_ENDS = {"exit", "deactivate", "conda", "module", "ml"}  # may stand after the program
_REFUSED = {
    **dict.fromkeys(
        ("for", "while", "until", "select"), "is a loop: submit a run for each turn, or write its lines out"
    ),
    **dict.fromkeys(("if", "case", "[", "[[", "test"), "is a condition: delete it, and keep the lines that apply"),
    **dict.fromkeys(("function", "{", "((", "let", "local"), "is not a plain command: write plain commands alone"),
    **dict.fromkeys(
        ("cp", "rsync", "tar", "unzip", "sbcast"),
        "copies files: delete it, and type --data PATH if it copies data to the nodes",
    ),
    **dict.fromkeys(
        ("pip", "pip3", "virtualenv"),
        "makes an environment in the job: make it once on shared storage, and type --python ENV/bin/python",
    ),
    "trap": "handles a signal: delete it, because the ranks get the signal, and the run continues by itself",
    "exit": "ends the script: delete it",
    "sbatch": "submits another job: use hpc submit --after-ok NAME",
}
# The rendezvous, which torchrun sets up by itself: names of variables, and what their values are made of.
_RENDEZVOUS = re.compile(
    r"(MASTER|MAIN|HEAD)_?(NODE|PROCESS|ADDR|ADDRESS|PORT|IP|HOST).*|.*RDZV.*|(LOCAL_)?WORLD_?SIZE|"
    r"((NODE|LOCAL|GROUP|MACHINE|GLOBAL)_)?RANK|NODES(_?(ARRAY|LIST))?|HOST(NAME|LIST)?S?",
    re.IGNORECASE,
)
_OF_RENDEZVOUS = "is a part of the rendezvous, which torchrun sets up: have the script read MASTER_ADDR, or use env://"
_ABOUT_NODES = re.compile(r"scontrol\s+show\s+host|\bSLURM_(JOB_)?NODELIST\b|\bhostname\b|SLURMD_NODENAME")
_ASSIGNMENT = re.compile(r"(\w+)(?:\[[^]]*\])?\+?=(.*)", re.DOTALL)
_PER_TASK = re.compile(r"\bSLURM_(PROCID|LOCALID|NODEID)\b")
# A line of --setup that depends on the directory in which it runs.
_RELATIVE = re.compile(r"(source|\.)\s+[\"']?[^/~$\"'\s]|>|cd ")
_HERE_DOCUMENT = re.compile(r"\d*<<(?!\()")
_WRITES = re.compile(r"(\d*|&)>(?!&|>?\s*/dev/(null|std(err|out))$)")
_COUNT = re.compile(r"'[^']*'|\\.|\$(?:(SLURM_\w+)|\{(SLURM_\w+)(?::-([^}]*))?\})")
# Variables of the shell whose values the job does not have.
_OF_THE_JOB = {"TMPDIR", "RANDOM", "HOSTNAME", "SECONDS", "BASH_SOURCE", "EPOCHSECONDS"}
_INSTEAD = {
    **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), "write {run_dir}, the run's own directory"),
    **dict.fromkeys(("SLURM_TMPDIR", "TMPDIR"), "write {data}, the node's copy of --data"),
    "SLURM_ARRAY_TASK_ID": "submit one run per setting",
}
# Stands in a word for what is known only in the job. The number is that of the reason.
_UNKNOWN = re.compile("\0(\\d+)\0")
_SHOWN = 60  # characters of a line in a message


@dataclass(frozen=True, kw_only=True)
class SetupLine:
    """A line of the script that becomes --setup."""

    line: int
    text: str
    sets: str | None = None
    """The name of the variable that it sets without exporting it; None for other lines."""


class StatementReader:
    """Reads the statements of a batch script.

    Args:
        directory: the directory in which the script starts.
        environment: the variables of the user's shell, which sbatch passes on.
        values: further variables of the job.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str], values: Mapping[str, str]) -> None:
        self.setup, self.notes = list[SetupLine](), list[str]()
        self.launch: Launch | None = None
        self.launch_line = 0
        self.directory = self._start = directory
        self._exported = set(environment)
        self._values, self._reasons = {**environment, **values}, list[str]()
        self._left_out = set[str]()
        self._in_step = False

    def read(self, lines: Iterable[Statement]) -> None:
        """Read statements. Raises UserError, with the number of the line, at the first that is not understood."""
        for statement in lines:
            try:
                self._read(statement)
            except UserError as error:
                text = str(error)
                raise UserError(text if text.startswith("line ") else f"line {statement.line}: {text}") from error

    def used_setup(self) -> list[SetupLine]:
        """Return the lines of --setup without variables that nothing but the program's command line uses."""
        used = list[SetupLine]()
        for line in reversed(self.setup):
            if line.sets is None or any(re.search(rf"\b{line.sets}\b", later.text) for later in used):
                used.insert(0, line)
        return used

    def _read(self, statement: Statement) -> None:
        commands, line, text = statement.commands, statement.line, statement.text
        operators = {command.operator for command in commands[:-1]}
        first, *others = (command.words[0] if command.words else "" for command in commands)
        if commands[-1].operator == "&":
            raise UserError(f"{_short(text)} runs in the background (&): delete & and wait")
        if any(_HERE_DOCUMENT.match(redirect) for command in commands for redirect in command.redirects):
            raise UserError("a here-document (<<) is not understood: write its text into a file")
        if operators <= {"&&"}:
            for command in commands:
                self._command(command, line, text if len(commands) == 1 else _text(command))
        elif operators == {"||"} and others == ["exit"]:  # each line of --setup must succeed: an exit says nothing more
            self._command(commands[0], line, _text(commands[0]))
        elif operators == {"||"} and others == ["true"] and first in _SETUP:
            self._add_setup(line, text)
        elif operators <= {"|", "|&"} and first in _PRINTS and set(others) <= _FILTERS | _PRINTS:
            self._note(line, text, "changes nothing for the ranks")
        elif operators <= {"|", "|&"} and set(others) == {"tee"} and first not in _PRINTS:
            self._command(commands[0], line, _text(commands[0]))
            self._note(line, _text(commands[-1]), "hpc logs prints the output")
        else:
            raise UserError(
                f"{_short(text)}: hpc submit does not understand {' '.join(sorted(operators))} here: delete it"
            )

    def _command(self, command: Command, line: int, text: str) -> None:
        """Read a simple command. `text` is the command as --setup would have it."""
        words = command.words
        assigned = next((at for at, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words))
        if assigned == len(words) or words[0] in {"export", "readonly"}:
            self._assign(words, line, text)
            return
        for word in words[:assigned]:  # VAR=value before a program
            self._assign(("export", word), line, f"export {word}")
        name, fields = words[assigned], [field for word in words[assigned:] for field in self._fields(word)]
        if not fields or name.startswith("(") or name.endswith("()"):
            raise UserError(f"{_short(text)} is a function or a subshell: write plain commands alone")
        if fields == ["exec"]:
            self._note(line, text, "hpc logs prints the output")
        elif _is_print(without_srun(fields, line)):
            self._print(command, line, text)
        elif self.launch is not None and name in _ENDS:
            self._note(line, text, "comes after the program")
        elif is_launcher(fields) and name not in _REFUSED:
            self._launch(fields, line, text)
            if any(re.match(r"\d*<", redirect) for redirect in command.redirects):
                raise UserError(f"{_short(text)} reads its input from <: give the file as an argument of the script")
            if command.redirects:
                self._note(line, " ".join(command.redirects), "hpc logs prints the output")
        else:
            self._other_command(fields, line, text)

    def _other_command(self, fields: Sequence[str], line: int, text: str) -> None:
        """Read a command that starts no program of a training."""
        name = fields[0]
        if name in {"mapfile", "readarray", "read"} and _ABOUT_NODES.search(text):
            self._left_out.update(fields[1:])
            self._note(line, text, "torchrun sets up the rendezvous")
            return
        if name in _REFUSED:
            raise UserError(f"{_short(text)} {_REFUSED[name]}")
        if self.launch is not None:
            raise UserError(f"{_short(text)} comes after the program of line {self.launch_line}: do it after the run")
        if name in _SETUP:
            self._add_setup(line, text)
        elif name == "cd":
            self._change_directory(fields[1:], line)
        elif name == "mkdir":
            if all(field.startswith(("/", "-")) for field in fields[1:]):
                self._add_setup(line, text)
            else:
                self._note(line, text, "type it before hpc submit if the training needs the directory")
        else:
            raise UserError(
                f"{_short(text)}: hpc submit does not know what {name} does: delete the line, and type it as --setup "
                "if it must run on the first node before the training"
            )

    # --- variables ---

    def _value_of(self, name: str) -> str | None:
        if name == "PWD":
            return str(self.directory)
        if name.isdigit():
            return self._unknown(f"${name} is an argument of the batch script, and sbatch passes none: write its value")
        if name in self._values and name not in _OF_THE_JOB:
            return self._values[name]
        if name in self._left_out:
            return self._unknown(f"${name} {_OF_RENDEZVOUS}")
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
        """Read assignments, after `export` or alone. Those of the rendezvous are left out."""
        exports, kept = words[0] == "export", list[str]()
        for word in words[words[0] in {"export", "readonly"} :]:
            match = _ASSIGNMENT.fullmatch(word)
            if match and self._set(match[1], match[2], word):
                self._left_out.add(match[1])
                self._note(line, f"export {word}" if exports else word, "torchrun sets up the rendezvous")
                continue
            if match and self._in_step and _PER_TASK.search(match[2]):
                raise UserError(f"{word} differs in each task: have the script read LOCAL_RANK and RANK")
            kept.append(word)
            if exports:
                self._exported.add(match[1] if match else word)
        names = {re.split(r"\W", word)[0] for word in kept}
        if kept:
            alone = names.pop() if len(names) == 1 and not names & self._exported else None
            text = text if len(kept) >= len(words) - 1 else " ".join(["export"] * exports + kept)
            self.setup.append(SetupLine(line=line, text=self._with_counts(text), sets=alone))

    def _set(self, name: str, written: str, word: str) -> bool:
        """Remember the value of a variable. Returns whether the variable is a part of the rendezvous."""
        if word.startswith(f"{name}=") and not written.startswith("("):
            # Bash does not divide an assigned value into fields.
            value = "".join(expand(written, self._value_of, self._unknown, splits=False))
        else:
            value = self._unknown(f"{_short(word)} is not a plain value: write its value where it is used")
        is_of_rendezvous = bool(_RENDEZVOUS.fullmatch(name) or _ABOUT_NODES.search(written))
        if is_of_rendezvous and _UNKNOWN.search(value):
            value = self._unknown(f"${name} {_OF_RENDEZVOUS}")
        self._values[name] = value
        return is_of_rendezvous or ("$" in written and bool(self._left_out & set(re.findall(r"\w+", written))))

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
        self.notes.append(f"left out line {line}: {_short(text)}: {reason}")

    def _print(self, command: Command, line: int, text: str) -> None:
        if not any(map(_WRITES.match, command.redirects)):
            self._note(line, text, "changes nothing for the ranks")
        elif self.launch is None and "srun" not in command.words:
            self._add_setup(line, text)
        else:
            raise UserError(f"{_short(text)} writes a file: delete it")

    def _change_directory(self, fields: Sequence[str], line: int) -> None:
        target = next(iter(fields), str(Path.home()))
        self._check_is_known(target)
        directory = Path(os.path.normpath(self.directory / target))
        if not directory.is_dir():
            raise UserError(f"cd {target}: there is no such directory here: write one that this machine has, too")
        if directory != self.directory and any(_RELATIVE.search(line.text) for line in self.setup):
            # The job starts in the last directory. The lines before this one need theirs.
            begin = [SetupLine(line=line, text=f"cd {shlex.quote(str(self._start))}")] * (self.directory == self._start)
            self.setup = [*begin, *self.setup, SetupLine(line=line, text=f"cd {shlex.quote(str(directory))}")]
        self.directory = directory

    def _launch(self, fields: Sequence[str], line: int, text: str) -> None:
        if self.launch is not None:
            raise UserError(f"{_short(text)} is a second program after line {self.launch_line}: submit a run for each")
        self._check_is_known(fields[0])
        launch = read_launch(fields, line)
        step = launch.step or ()
        self._check_is_known(*(option.value for option in step if option.name in COUNTS))
        if isinstance(launch, ShellText):
            self._read_text(launch, line, text)
        else:
            self._check_is_known(*launch.script, *launch.exports, launch.python, launch.container or "")
            self.launch, self.launch_line = launch, line

    def _read_text(self, shell: ShellText, line: int, text: str) -> None:
        """Read the statements of `bash -c`, perhaps in a step of srun."""
        self._check_is_known(shell.text)
        self._in_step = shell.step is not None
        self.read(statements(shell.text, line))
        self._in_step = False
        if self.launch is None:
            raise UserError(f"{_short(text)} starts no training: write srun python train.py")
        if shell.step is not None:
            self.launch = replace(self.launch, step=(*shell.step, *(self.launch.step or ())))


def _is_print(words: Sequence[str]) -> bool:
    """Return whether a command only prints something."""
    name, *rest = words or [""]
    if re.fullmatch(r"python[\d.]*", name):
        return rest[:1] in (["--version"], ["-V"]) or (rest[:1] == ["-c"] and "print(" in " ".join(rest))
    return name in _PRINTS and not (name == "env" and is_launcher(words))


def _text(command: Command) -> str:
    return " ".join((*command.words, *command.redirects))


def _short(text: str) -> str:
    """Return a line of the script, or its beginning, for a message."""
    line = " ".join(_UNKNOWN.sub("...", text).split())
    return f"`{line}`" if len(line) <= _SHOWN else f"`{line[: _SHOWN - 3]}...`"
