"""Makes text safe for terminals, spreadsheets and other people, and suggests similar words. Pure; runs everywhere."""

import difflib
import os
import re
from collections.abc import Iterable, Sequence

# Control characters, also C1, which some terminals obey; characters that reverse the direction of text; and parts of
# surrogate pairs, which stand for bytes that are not UTF-8 and cannot be printed.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# A spreadsheet takes text that begins with one of these for a formula.
_FORMULA, _ESCAPED = re.compile(r"'*[=+\-@\t\r]"), re.compile(r"'+[=+\-@\t\r]")
# A secret is known by its name: HF_TOKEN, --api-key, wandb.password, but not TOKENIZERS_PARALLELISM.
_SENSITIVE = r"[\w.-]*(?<![a-z])(?:(?:api)?key|token|secret|passw(?:or)?d)(?![a-z])[\w.-]*"
_HIDDEN = "***"
# What only names the place of a secret: $NAME, ${NAME} or $(COMMAND), perhaps in quotes.
_REFERENCE = r"(\"?)(?:\$(?:\w+|\{\w+\}|\([^()]*\))|`[^`]*`)\2(?=[\s;&|]|$)"
_SECRET_IN_LINE = re.compile(
    rf"((?<![\w$.-]){_SENSITIVE}\+?=|--{_SENSITIVE}[\s=]+(?!-))(?!{_REFERENCE})"
    r"(?:\"(?:\\.|[^\"\\])*\"|'[^']*'|\\.|[^\s;&|\"'\\])+",
    re.IGNORECASE | re.DOTALL,
)
_SECRET_DEFAULT = re.compile(rf"(\$\{{{_SENSITIVE}:?[-=])[^}}]*", re.IGNORECASE)  # ${NAME:=VALUE}
_SECRET_IN_ADDRESS = re.compile(r"(://[^\s/:@]*:)[^\s/@]+(?=@)")
_SECRET_IN_WORD = re.compile(rf"(-*{_SENSITIVE}=)(.+)", re.IGNORECASE | re.DOTALL)
_SECRET_FLAG = re.compile(rf"--?{_SENSITIVE}", re.IGNORECASE)
# A number, such as the one of --key-dim 64.
_NO_SECRET = re.compile(r"[\d.e-]{1,5}")


def visible(text: str) -> str:
    r"""Replace control characters by visible escapes such as `\x1b`, so that no terminal obeys them. Tabs stay."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def without_secrets(line: str) -> str:
    """Replace the values of keys, tokens, secrets and passwords that a line of Bash sets by ***."""
    for pattern in (_SECRET_IN_LINE, _SECRET_DEFAULT, _SECRET_IN_ADDRESS):
        line = pattern.sub(rf"\1{_HIDDEN}", line)
    return line


def words_without_secrets(words: Sequence[str]) -> tuple[str, ...]:
    """Replace the values of keys, tokens, secrets and passwords on a command line by ***."""
    shown = list[str]()
    for word, before in zip(words, ["", *words], strict=False):
        name, value = match.groups() if (match := _SECRET_IN_WORD.fullmatch(word)) else ("", word)
        if name or (_SECRET_FLAG.fullmatch(before) and not word.startswith("-")):
            shown.append(word if _NO_SECRET.fullmatch(value) else f"{name}{_HIDDEN}")
        else:
            shown.append(without_secrets(word))
    return tuple(shown)


def file_name(name: str | bytes) -> str:
    r"""Return a file's name as text that can be written anywhere: bytes that are not UTF-8 become escapes: `\xe9`."""
    return os.fsencode(name).decode(errors="backslashreplace")


def few(names: Sequence[str], separator: str = ", ") -> str:
    """Return names in one line for people. More than four names are shortened to the first, the last and the number."""
    return f"{names[0]} ... {names[-1]} ({len(names)})" if len(names) > 4 else separator.join(names)


def rank_names(ranks: Sequence[int]) -> str:
    """Return ranks in words, such as `rank 3` or `ranks 3, 4`."""
    return f"rank{'s' * (len(ranks) > 1)} {few([str(rank) for rank in ranks])}"


def csv_cell(value: object) -> object:
    """Return a value as a CSV cell, with an apostrophe before text that a spreadsheet would take for a formula."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def csv_text(cell: str) -> str:
    """Return the original text of a cell that `csv_cell` made."""
    return cell[1:] if _ESCAPED.match(cell) else cell


def similar(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return at most `count` known words that resemble a typed word, the most similar one first."""
    # A single suggestion must be right; of several suggestions, one must be.
    return difflib.get_close_matches(word, list(known), n=count, cutoff=0.7 if count == 1 else 0.5)


def did_you_mean(word: str, known: Iterable[str], otherwise: str, count: int = 3) -> str:
    """Return a question that suggests known words similar to a typed word, or `otherwise` if no word is similar."""
    close = similar(word, known, count)
    return f"did you mean {', '.join(close)}?" if close else otherwise


def flag(field: str) -> str:
    """Return the flag of a field: `--batch-size` for `batch_size`."""
    return "--" + field.replace("_", "-")
