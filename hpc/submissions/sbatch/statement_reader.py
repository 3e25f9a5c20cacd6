"""Divides a batch script into commands, and reads what they do, in their order. Runs on the login node.

A command becomes a line of --setup, starts the training, is left out because it does nothing for the ranks, or is
refused. A variable has the value that it has at its place in the script.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from hpc.base.errors import UserError
from hpc.submissions.sbatch.batch_options import COUNTS
from hpc.submissions.sbatch.launch_line import Launch, read_launch, read_program
from hpc.submissions.sbatch.printing_commands import SETS_DEFAULT, STRICT, only_prints, short, writes

_BASH = Parser(Language(tree_sitter_bash.language()))
_COMMANDS = {"command", "declaration_command", "unset_command", "variable_assignment", "variable_assignments"}
_REDIRECTS = {"file_redirect", "heredoc_redirect", "herestring_redirect"}
_SUBSTITUTIONS = {"command_substitution", "process_substitution"}
# Variables of each shell, or of this machine, whose values the job does not have.
_OF_THE_JOB = {"TMPDIR", "RANDOM", "HOSTNAME", "SECONDS", "EPOCHSECONDS", "BASH_SOURCE", "BASH_ENV"}
# Stands in a word for what is known only in the job. The number is that of the reason.
_UNKNOWN = re.compile("\ue000(\\d+)\ue000")
_ADVICE = {
    "SLURM_JOB_ID": "write {run_dir}, the run's own directory", "TMPDIR": "write {data}, the node's copy of --data",
    "SLURM_TMPDIR": "write {data}, the node's copy of --data", "SLURM_ARRAY_TASK_ID": "submit one run per setting",
}  # fmt: skip
_WRITE = "write its value, or have the script read what torchrun sets (MASTER_ADDR, RANK, WORLD_SIZE)"
_EXPORTS_ALL = re.compile(r"set\s+(?!--).*?([-+])(?:\w*a\w*|\w*o\s+allexport)\b")
# Commands that change the environment of the ranks, or limits that they inherit.
_SETUP = re.compile(
    r"(module|ml|source|\.|conda|mamba|micromamba|eval|unset|ulimit|umask|mkdir -p|mapfile|readarray|read|shopt|"
    rf"(?!{STRICT})set|:(?=.*{SETS_DEFAULT.pattern}))\s"
)
# Those that also change how Bash expands the words of later lines.
_CHANGES_WORDS = re.compile(r"unset|shopt|set|:")
_AFTER_PROGRAM = re.compile(r"(exit|deactivate|conda|module|ml|set)(\s|$)")
# Variables that torchrun sets for the ranks, or that only its options use.
_RENDEZVOUS = re.compile(r"MASTER_(ADDR|PORT)|(LOCAL_)?WORLD_SIZE|((NODE|LOCAL|GROUP)_)?RANK|.*RDZV.*")
_PER_TASK = re.compile(r"\bSLURM_(PROCID|LOCALID|NODEID)\b")
# A line of --setup that depends on the directory in which it runs.
_RELATIVE = re.compile(r"(source|\.)\s+[\"']?[^/~$\"'\s]|>|cd |mkdir")
_IN_LOGS = "hpc logs prints the output"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A simple command. A compound one has no words."""

    line: int
    text: str
    """The command as it is written, in one line if no quoted text has several."""
    words: tuple[Node, ...] = ()
    redirects: tuple[str, ...] = ()
    operator: str = ""
    """The operator before the command; of a statement's first command, `&` if the statement runs in the background."""


def _text_of(node: Node) -> str:
    """Return the text of a node as it is written, with continued lines as one line."""
    return re.sub(r"[ \t]*\\\n[ \t]*", " ", (node.text or b"").decode())


def statements(text: str, first_line: int = 1) -> Iterator[list[Command]]:
    """Yield the commands that operators connect, statement by statement. The text must be valid Bash (`bash -n`)."""
    nodes = _BASH.parse(text.encode()).root_node.children
    for node, after in zip(nodes, [*nodes[1:], None], strict=True):
        if node.is_named and node.type != "comment":
            commands = _flat(node, first_line)
            is_background = after is not None and after.type == "&"
            yield [replace(commands[0], operator="&" * is_background), *commands[1:]]


def _flat(node: Node, first_line: int) -> list[Command]:
    """Return the commands of a statement."""
    if node.type in {"list", "pipeline"}:
        commands, operator = list[Command](), ""
        for child in node.children:
            if child.is_named:
                first, *others = _flat(child, first_line)
                commands += [replace(first, operator=operator), *others]
            operator = child.type
        return commands
    if node.type == "redirected_statement" and node.children[0].type not in _REDIRECTS:
        *commands, last = _flat(node.children[0], first_line)
        after = tuple(map(_text_of, node.children[1:]))
        return [*commands, replace(last, text=" ".join((last.text, *after)), redirects=(*last.redirects, *after))]
    parts = node.children if node.type in _COMMANDS else []
    words = [node] if node.type == "variable_assignment" else [part for part in parts if part.type not in _REDIRECTS]
    redirects = tuple(_text_of(part) for part in parts if part.type in _REDIRECTS)
    line = first_line + node.start_point.row
    return [Command(line=line, text=_text_of(node), words=tuple(words), redirects=redirects)]


class BashWords:
    """Has Bash expand words with the values that variables have at their place in the script.

    Bash runs the assignments and changes of the directory before it, but no other command and no command substitution.

    The script starts in `directory`, with the `environment` of the user's shell, which sbatch passes on, and with those
    of Slurm's variables that follow from its options (`values`).
    """

    def __init__(self, directory: Path, environment: Mapping[str, str], values: Mapping[str, str]) -> None:
        self._start, self._reasons = directory, list[str]()
        self._environment = {
            name: value for name, value in environment.items() if not (name in _OF_THE_JOB or name.startswith("SLURM"))
        }
        self._names = {*self._environment, *values, "PWD", "UID"}
        self._program = [f"{name}={shlex.quote(value)}" for name, value in values.items()]

    def assign(self, command: Command, names: Sequence[str]) -> None:
        """Set variables as a command does. What Bash cannot compute is unknown."""
        masked = shlex.quote(" ".join(map(self._masked, command.words)))
        unknown = self._unknown(f"`{command.text}` is computed while the job runs: {_WRITE}")
        otherwise = "; ".join([":", *(f"{name}={unknown}" for name in names)])
        self._program.append(f"eval {masked} 2>/dev/null || {{ {otherwise}; }}")
        self._names |= set(names)

    def change_directory(self, path: Path) -> None:
        """Expand further words in another directory."""
        self._program.append(f"cd {shlex.quote(str(path))}")

    def expand(self, words: Sequence[Node]) -> list[str]:
        """Return the fields to which Bash expands words: see `check`. Raises UserError if Bash fails."""
        masked = " ".join(map(self._masked, words))
        done = subprocess.run(
            ["bash", "-c", "\n".join([*self._program, f"printf '%s\\0' - {masked}"])], cwd=self._start,
            env=self._environment, capture_output=True, text=True, errors="surrogateescape", check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise UserError(f"`{' '.join(map(_text_of, words))}` is computed while the job runs: {_WRITE}")
        return done.stdout.split("\0")[1:-1]

    def check(self, *fields: str) -> None:
        """Raise UserError, with the reason, if a field is known only in the job."""
        for field in fields:
            if match := _UNKNOWN.search(field):
                raise UserError(self._reasons[int(match[1])])

    def _unknown(self, reason: str) -> str:
        self._reasons.append(reason)
        return f"\ue000{len(self._reasons) - 1}\ue000"

    def _masked(self, node: Node) -> str:
        """Return the text of a node without command substitutions, after setting what only the job knows."""
        text = _text_of(node)
        # The parser leaves the patterns of expansions unparsed: ${NAME#$(COMMAND)}.
        is_computed = node.type == "expansion" and re.search(r"\$\(|`|[<>]\(", text)
        if is_computed or node.type in _SUBSTITUTIONS or re.fullmatch(r"\$([$!?\d]|\{\d.*)", text):
            return self._unknown(f"{text} is computed while the job runs: {_WRITE}")
        if node.type == "variable_name" and text not in self._names and not _may_be_unset(node):
            in_job = text in _OF_THE_JOB or text.startswith("SLURM")
            where = "known only in the job" if in_job else "set neither in the file nor in this shell"
            reason = f"${text} is {where}: {_ADVICE.get(text, _WRITE)}"
            self._program.append(f"unset {text}; {text}={self._unknown(reason)}")
            self._names.add(text)
        return _rewritten(node, self._masked)


def _rewritten(node: Node, rewrite: Callable[[Node], str]) -> str:
    """Return the text of a node with what `rewrite` makes of each node in it."""
    source, start = node.text or b"", node.start_byte
    parts, at = list[bytes](), start
    for child in node.children:
        parts += [source[at - start : child.start_byte - start], rewrite(child).encode()]
        at = child.end_byte
    return b"".join((*parts, source[at - start :])).decode()


def _may_be_unset(variable: Node) -> bool:
    """Return whether a name stands where it gets a value, or has a default."""
    parent = variable.parent
    while parent and parent.type == "subscript":
        parent = parent.parent
    is_set = parent is not None and parent.type in {"variable_assignment", "declaration_command", "unset_command"}
    return is_set or (
        parent is not None and any(child.type.lstrip(":") in {"-", "=", "+"} for child in parent.children)
    )


@dataclass(frozen=True, kw_only=True)
class SetupLine:
    """A line of the script that becomes --setup."""

    line: int
    text: str
    sets: str | None = None
    """The name of the variable that it sets without exporting it; None for other lines."""


class StatementReader:
    """Reads the statements of a batch script. `BashWords` explains the arguments.

    `values` has Slurm's variables. The value is empty if no option sets the variable.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str], values: Mapping[str, str]) -> None:
        self.setup, self.notes = list[SetupLine](), list[tuple[int, str]]()
        self.launch: Launch | None = None
        self.launch_line = 0
        self.directory = self._start = directory
        self._exported, self._values, self._exports_all = set(environment), values, False
        self._words = BashWords(directory, environment, {name: value for name, value in values.items() if value})

    def read(self, lines: Iterable[Sequence[Command]]) -> None:
        """Read statements. Raises UserError, with the number of the line, at the first that is not understood."""
        for commands in lines:
            try:
                self._read(commands)
            except UserError as error:
                text = str(error)
                raise UserError(text if text.startswith("line ") else f"line {commands[0].line}: {text}") from error

    def used_setup(self) -> list[SetupLine]:
        """Return the lines of --setup without variables that nothing but the line of the program uses."""
        used = list[SetupLine]()
        for line in reversed(self.setup):
            if line.sets is None or any(re.search(rf"\b{line.sets}\b", later.text) for later in used):
                used.insert(0, line)
            else:
                self._note(line.line, line.text, "nothing but the line of the program uses it")
        return used

    def _read(self, commands: Sequence[Command]) -> None:
        first, *others = commands
        text = " ".join([first.text, *(f"{command.operator} {command.text}" for command in others)])
        operators = {command.operator for command in others}
        if first.operator == "&":
            raise UserError(f"{short(text)} runs in the background: delete & and wait")
        if any("<<" in redirect for command in commands for redirect in command.redirects):
            raise UserError("a here-document (<<) is not understood: write its text into a file")
        if operators == {"||"} and all(command.text.startswith("exit") for command in others):
            self._read([first])  # each line of --setup must succeed
        elif self.launch is None and all(_SETUP.match(command.text) or command.text == "true" for command in commands):
            for command in commands:
                self._change_shell(command)
            self._add_setup(first.line, text)
        elif operators <= {"&&"}:
            if any(command.text.startswith("grep ") for command in commands[:-1]):
                raise UserError(f"{short(text)} is a condition: write what holds on the nodes")
            for command in commands:
                self._command(command)
        elif operators <= {"|", "|&"}:
            self._pipeline(commands, text)
        else:
            raise UserError(f"{short(text)}: hpc submit does not understand {' '.join(operators)} here: delete it")

    def _change_shell(self, command: Command) -> None:
        """Read a command that becomes --setup and may change how Bash expands words, or what it exports."""
        if _CHANGES_WORDS.match(command.text):
            self._words.assign(command, SETS_DEFAULT.findall(command.text))
        if match := _EXPORTS_ALL.match(command.text):
            self._exports_all = match[1] == "-"

    def _pipeline(self, commands: Sequence[Command], text: str) -> None:
        first, *others = commands
        if all(map(_prints, commands)):
            self._note(first.line, text, "changes nothing for the ranks")
        elif all(command.text.startswith("tee ") for command in others):
            before = self.launch
            self._command(first)
            if self.launch is before:
                raise writes(text)
            self._note(first.line, others[0].text, _IN_LOGS)
        else:
            raise UserError(f"{short(text)}: hpc submit does not understand | here: delete it")

    def _command(self, command: Command) -> None:
        words, text = command.words, command.text
        if not words:
            raise UserError(
                f"{short(text)} is more than a plain command: write plain commands, and submit a run for each turn of "
                "a loop"
            )
        if words[0].type in {"export", "readonly"} or all(word.type == "variable_assignment" for word in words):
            self._assign(command)
        elif _prints(command):
            self._note(command.line, text, "changes nothing for the ranks")
        elif words[0].type == "command_name" and _text_of(words[0]) == "exec" and len(words) == 1:
            self._note(command.line, text, _IN_LOGS)
        elif self.launch is not None and _AFTER_PROGRAM.match(text):
            self._note(command.line, text, "comes after the program")
        elif self.launch is not None:
            raise UserError(
                f"{short(text)} comes after the program of line {self.launch_line}: do it after the run, or submit a "
                "run for each program"
            )
        elif _text_of(words[0]) == "cd":
            self._change_directory(command)
        else:
            prefix = ["env"] if words[0].type == "variable_assignment" else []
            self._launch(command, read_launch([*prefix, *self._words.expand(words)], command.line))

    def _assign(self, command: Command) -> None:
        """Read assignments, after `export` or alone. Those of the rendezvous are left out."""
        exports, kept, names = command.words[0].type == "export", list[str](), list[str]()
        for word in map(_text_of, command.words[command.words[0].type in {"export", "readonly"} :]):
            names.append(re.split(r"\W", word)[0])
            if _RENDEZVOUS.fullmatch(names[-1]):
                self._note(command.line, "export " * exports + word, "torchrun sets up the rendezvous")
            elif exports and _PER_TASK.search(word):
                raise UserError(f"{word} differs in each task: have the script read LOCAL_RANK and RANK")
            else:
                kept.append(word)
        self._words.assign(command, names)
        self._exported |= set(names) if exports or self._exports_all else set()
        if kept:
            alone = names[0] if len(names) == 1 and names[0] not in self._exported else None
            self._add_setup(command.line, "export " * exports + " ".join(kept), alone)

    def _launch(self, command: Command, launch: Launch) -> None:
        """Read a command that may start the training."""
        self._words.check(*launch.words[:1])
        if only_prints(launch.words, command.text, command.redirects):
            self._note(command.line, command.text, "changes nothing for the ranks")
            return
        if (text := launch.shell_text) is None:
            self.launch, self.launch_line = read_program(launch, command.line), command.line
        else:
            self._words.check(text)
            self.read(statements(text, command.line))
            if self.launch is None:
                raise UserError(f"{short(command.text)} starts no training: write srun python train.py")
            step = (
                None if self.launch.step is launch.step is None else (*(launch.step or ()), *(self.launch.step or ()))
            )
            self.launch = replace(self.launch, step=step, exports=(*launch.exports, *self.launch.exports))
        counts = (option.value for option in self.launch.step or () if option.name in COUNTS)
        exports = (value for _, value in self.launch.exports)
        self._words.check(*self.launch.script, *exports, *counts, self.launch.container or "")
        if any(redirect.startswith("<") for redirect in command.redirects):
            raise UserError(f"{short(command.text)} reads its input from <: give the file as an argument of the script")
        if command.redirects:
            self._note(command.line, " ".join(command.redirects), _IN_LOGS)

    def _change_directory(self, command: Command) -> None:
        target = next(iter(self._words.expand(command.words[1:])), str(Path.home()))
        self._words.check(target)
        directory = Path(os.path.normpath(self.directory / target))
        if not directory.is_dir():
            raise UserError(f"cd {target}: there is no such directory here: write one that this machine has, too")
        if directory != self.directory and any(_RELATIVE.search(line.text) for line in self.setup):
            # The job starts in the last directory. The lines before this one need theirs.
            first, then = (
                SetupLine(line=command.line, text=f"cd {shlex.quote(str(path))}") for path in (self._start, directory)
            )
            self.setup = [*[first] * (self.directory == self._start), *self.setup, then]
        self.directory = directory
        self._words.change_directory(directory)

    def _add_setup(self, line: int, text: str, sets: str | None = None) -> None:
        self.setup.append(SetupLine(line=line, text=self._with_values(_BASH.parse(text.encode()).root_node), sets=sets))

    def _with_values(self, node: Node) -> str:
        """Return the text of a node with the numbers of the batch script in place of Slurm's variables."""
        text, parts, parent = _text_of(node), node.children, node.parent
        if node.type == "variable_name" and parent and parent.type.endswith(("_expression", "arithmetic_expansion")):
            return self._values.get(text, text) or "0"
        if node.type == "regex":  # the parser leaves the patterns of expansions unparsed: ${NAME#$SLURM_SUBMIT_DIR}
            return re.sub(r"\$\{?(SLURM_\w+)\}?", lambda found: self._values.get(found[1], found[0]), text)
        name = next((_text_of(part) for part in parts if part.type == "variable_name"), "")
        if node.type not in {"simple_expansion", "expansion"} or name not in self._values:
            return _rewritten(node, self._with_values)
        value, before = self._values[name], text.partition("$")[0]  # the parser may add the blank before a $
        if len(parts) > 3 and parts[2].type not in {":-", "-", ":=", "="}:
            fields = self._words.expand([node])
            self._words.check(*fields)
            value = " ".join(fields)
        elif not value:
            return before + "".join(map(self._with_values, parts[3:-1]))
        while parent and parent.type in {"expansion", "concatenation"}:
            parent = parent.parent
        return before + (value if parent and parent.type == "string" else shlex.quote(value))

    def _note(self, line: int, text: str, reason: str) -> None:
        self.notes.append((line, f"left out line {line}: {short(text)}: {reason}"))


def _prints(command: Command) -> bool:
    """Return whether a command only prints something: see `only_prints`."""
    return bool(command.words) and only_prints(list(map(_text_of, command.words)), command.text, command.redirects)
