"""Divides a batch script into commands and words, and expands words, as Bash does. Pure; runs on the login node.

It knows quotes, comments, continued lines and operators, and the expansion of plain variables. It does not know
compound commands: for the caller, `for` and `if` are commands like others. The text must be valid Bash (`bash -n`).
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_SPACE = re.compile(r"(?:[ \t]|\\\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_REDIRECT = re.compile(r"\d*(?:<<<|<<-?|<>|>>|>\||>&|<&|>|<(?!\()|>(?!\())|&>>?")
_OPERATOR = re.compile(r"&&|\|\||\|&|;;|[;&|\n]")
_NESTED = {"$(": ")", "<(": ")", ">(": ")", "${": "}"}
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}$`'\"\\]*))?\})")
_ARITHMETIC = re.compile(r"\$\(\(([\w\s${}*+]+)\)\)")
_ARGUMENTS = {"$@", '"$@"', "$*", '"$*"'}  # sbatch FILE passes none, so Bash drops these words
_BRACES = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}")
_SPECIAL_IN_QUOTES = '$`"\\\n'
_COMPUTED = "is computed while the job runs: write its value"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A simple command of a statement."""

    words: tuple[str, ...]
    """The words as they are written, with their quotes."""
    redirects: tuple[str, ...]
    """The redirections as they are written, without spaces: `2>&1`, `>log.txt`."""
    operator: str
    """The operator after the command: `&&`, `||`, `|`, `|&`, `&`; empty at the end of the statement."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """Commands that operators connect. A statement ends with its line, or at `;` or `&`."""

    line: int
    """The number of its first line in the file."""
    text: str
    """The statement as it is written, without comments, in one line if no quoted text has several lines."""
    commands: tuple[Command, ...]


def statements(text: str, first_line: int = 1) -> Iterator[Statement]:
    """Yield the statements of a script."""
    commands, words, redirects = list[Command](), list[str](), list[str]()
    at, start, end = 0, None, 0
    text += "\n"
    while at < len(text):
        if match := _SPACE.match(text, at) or _COMMENT.match(text, at):
            at = match.end()
            continue
        start = at if start is None and text[at] != "\n" else start
        if match := _REDIRECT.match(text, at):
            space = _SPACE.match(text, match.end())
            target = space.end() if space else match.end()
            at = end = _word_end(text, target)
            redirects.append(match[0] + text[target:end])
        elif match := _OPERATOR.match(text, at):
            at, operator = match.end(), match[0]
            if operator == "\n" and not words and commands and commands[-1].operator not in {"", "&"}:
                continue  # the statement goes on after an operator at the end of the line
            if words or redirects:
                after = "" if operator in {"\n", ";", ";;"} else operator
                commands.append(Command(words=tuple(words), redirects=tuple(redirects), operator=after))
                words, redirects = [], []
            if operator in {"\n", ";", ";;", "&"} and commands:
                line = first_line + text.count("\n", 0, start)
                joined = re.sub(r"[ \t]*\\\n[ \t]*", " ", text[start:end])
                yield Statement(line=line, text=joined, commands=tuple(commands))
                commands, start = [], None
        else:
            begin, at = at, max(_word_end(text, at), at + 1)
            end = at
            words.append(text[begin:end])


def _word_end(text: str, at: int) -> int:
    """Return the index after the word that begins at `at`."""
    while at < len(text) and (text[at] not in " \t\n;&|<>" or text[at : at + 2] in _NESTED):
        at = _after(text, at)
    return at


def _after(text: str, at: int) -> int:
    """Return the index after the character at `at`, or after the quoted or nested text that it begins."""
    character, two = text[at], text[at : at + 2]
    if character == "\\":
        return at + 2
    if character in "'`":
        return (text.find(character, at + 1) + 1) or len(text)
    if character == '"':
        at += 1
        while at < len(text) and text[at] != '"':
            is_special = text[at] in "\\`" or text[at : at + 2] in {"$(", "${"}
            at = _after(text, at) if is_special else at + 1
        return at + 1
    if closing := _NESTED.get(two) or (")" if character == "(" else None):
        at += 1 if character == "(" else 2
        while at < len(text) and text[at] != closing:
            at = _after(text, at)
    return at + 1


def expand(
    word: str, value_of: Callable[[str], str | None], unknown: Callable[[str], str], *, splits: bool = True
) -> list[str]:
    """Return the fields to which Bash would expand a word: usually one, but none or several for unquoted variables.

    Args:
        word: the word as it is written.
        value_of: returns the value of a variable; None if it is not set.
        unknown: returns a text without spaces that stands for what cannot be expanded. Its argument is the reason.
        splits: whether Bash divides values into fields, as it does unless the word is assigned to a variable.
    """
    if word in _ARGUMENTS:
        return []
    fields = [""]
    for piece, is_quoted, is_literal in _pieces(word):
        if is_literal:
            fields[-1] += piece
        elif match := _VARIABLE.fullmatch(piece):
            value = value_of(match[1] or match[2])
            value = match[3] if value is None else value
            if value is None:
                value = unknown(f"{piece} is set neither in the file nor in this shell: write its value")
            first, *more = re.split(r"[ \t\n]+", value) if splits and not is_quoted else [value]
            fields[-1] += first
            fields += more
        elif match := _ARITHMETIC.fullmatch(piece):
            fields[-1] += _sum(match[1], value_of) or unknown(f"{word} {_COMPUTED}")
        elif piece.startswith(("$(", "${", "`", "$'")):
            fields[-1] += unknown(f"{word} {_COMPUTED}")
        elif not is_quoted and (piece in {"*", "?"} or _BRACES.fullmatch(piece)):
            fields[-1] += unknown(
                f"{word} is a pattern, which hpc submit does not expand: quote it, or write the names"
            )
        else:
            fields[-1] += piece
    has_quotes = "'" in word or '"' in word
    return fields if has_quotes else [field for field in fields if field]


def _pieces(word: str) -> Iterator[tuple[str, bool, bool]]:
    """Yield the parts of a word without quotes; whether each is in double quotes; whether Bash leaves it unchanged."""
    at, is_quoted = 0, False
    if re.match(r"~(/|$)", word):
        yield str(Path.home()), False, True
        at = 1
    while at < len(word):
        character, end = word[at], at + 1
        if character == '"':
            is_quoted = not is_quoted
        elif character == "'" and not is_quoted:
            end = _after(word, at)
            yield word[at + 1 : end - 1], False, True
        elif character == "\\":
            end += 1
            keeps = is_quoted and word[at + 1] not in _SPECIAL_IN_QUOTES
            yield word[at + (not keeps) : end].removeprefix("\n"), is_quoted, True
        else:
            match = _VARIABLE.match(word, at) or (None if is_quoted else _BRACES.match(word, at))
            quote = 1 if word[at : end + 1] == "$'" and not is_quoted else 0
            end = match.end() if match else _after(word, at + quote) if character in "$`" else end
            yield word[at:end], is_quoted, False
        at = end


def _sum(expression: str, value_of: Callable[[str], str | None]) -> str | None:
    """Return the value of a sum of products of whole numbers and variables; None if one is not a whole number."""
    values = [
        [name if name.isdigit() else value_of(name) or "" for name in (part.strip(" ${}") for part in term.split("*"))]
        for term in expression.split("+")
    ]
    if not all(value.isdigit() for term in values for value in term):
        return None
    return str(sum(math.prod(map(int, term)) for term in values))
