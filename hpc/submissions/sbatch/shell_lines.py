"""Divides a batch script into commands, and has Bash expand their words. Runs on the login node."""

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from hpc.base.errors import UserError

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


def text_of(node: Node) -> str:
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
        redirects = tuple(map(text_of, node.children[1:]))
        return [*commands, replace(last, text=" ".join((last.text, *redirects)), redirects=redirects)]
    is_simple = node.type in _COMMANDS
    words = [child for child in node.children if child.type not in _REDIRECTS] if is_simple else []
    words = [node] if node.type == "variable_assignment" else words
    return [Command(line=first_line + node.start_point.row, text=text_of(node), words=tuple(words))]


class BashWords:
    """Has Bash expand words with the values that variables have at their place in the script.

    Bash runs the assignments and changes of the directory before it, but no other command and no command substitution.

    Args:
        directory: the directory in which the script starts.
        environment: the variables of the user's shell, which sbatch passes on.
        values: further variables of the job.
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
            raise UserError(f"`{' '.join(map(text_of, words))}` is computed while the job runs: {_WRITE}")
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
        text = text_of(node)
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
        parts, at = list[bytes](), node.start_byte
        source = node.text or b""
        for child in node.children:
            parts += [source[at - node.start_byte : child.start_byte - node.start_byte], self._masked(child).encode()]
            at = child.end_byte
        return b"".join((*parts, source[at - node.start_byte :])).decode()


def _may_be_unset(variable: Node) -> bool:
    """Return whether a name stands where it gets a value, or has a default."""
    parent = variable.parent
    while parent and parent.type == "subscript":
        parent = parent.parent
    is_set = parent is not None and parent.type in {"variable_assignment", "declaration_command", "unset_command"}
    return is_set or (
        parent is not None and any(child.type.lstrip(":") in {"-", "=", "+"} for child in parent.children)
    )
