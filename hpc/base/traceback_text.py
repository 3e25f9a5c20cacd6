"""Finds, in the output of a Python program, the exception that ended the program. Pure; runs everywhere.

After torch's `init_process_group` each line of an uncaught exception names the rank: `[rank1]: ValueError: no luck`.
The process wrapper of each rank imports this module, which therefore imports little.
"""

import re
from collections.abc import Sequence

_HEADER = "Traceback (most recent call last)"
_RANK = re.compile(r"(?:\[rank\d+\]: )+")
# Characters to the left of a traceback that a message quotes, or that belongs to an exception group.
_MARGIN = re.compile(r"[\s|+]*")
_EXCEPTION = re.compile(r"[^\W\d][\w.<>]*(?::|$)")
# Header of a traceback that is not quoted in a message. Python, exception groups and rich print it in these forms.
_OWN_HEADER = re.compile(r"(?:  \+ Exception Group |╭─+ )?Traceback")
_CHAINED = re.compile(r"(?:The above exception was the direct cause of|During handling of the above exception)")
# Lines that Python prints above a traceback that does not end the process.
_DOES_NOT_END = re.compile(r"Exception (?:ignored|in thread)|Error in (?:atexit|sys\.)|--- Logging error|Process \S+:$")
_MOST_LINES_AFTER = 20

_Traceback = tuple[int, int]
"""Line numbers of a traceback's header and of the line that names its exception."""


def describe_exception(printed: Sequence[str]) -> str:
    """Return the message of the last exception; empty if there is none, or if later output shows that it was caught.

    If the exception quotes or is chained to another one, the other one follows in parentheses, because it may name the
    cause: on a full disk, torch.save raises a RuntimeError while it handles an OSError.
    """
    lines = _without_ranks(printed)
    found = _last_exception(lines)
    if not found:
        return ""
    (_, last), uncaught = found[-1], _RANK.match(printed[found[0][0]])
    if not uncaught and sum(any(map(str.isalnum, line)) for line in lines[last + 1 :]) > _MOST_LINES_AFTER:
        return ""
    # The traceback of an exception group itself is the least indented; the tracebacks of its members are inside.
    _, main = min(reversed(found), key=lambda each: _indentation(lines[each[0]]))
    message = _message(lines, main)
    others = [other for _, number in found if (other := _message(lines, number)) != message]
    return f"{message[:250]} (with {others[0][:240]})" if others else message[:500]


def exception_lines(printed: Sequence[str]) -> list[str]:
    """Return the lines of the last exception with its tracebacks; empty without an exception."""
    lines = _without_ranks(printed)
    found = _last_exception(lines)
    if not found:
        return []
    first, last = found[0][0], found[-1][1]
    end = last + 1
    while end < len(lines) and _RANK.match(printed[last]) and (_RANK.match(printed[end]) or not printed[end].strip()):
        end += 1
    return [*lines[first:last], *"\n".join(lines[last:end]).rstrip().splitlines()]


def _without_ranks(printed: Sequence[str]) -> list[str]:
    return [_RANK.sub("", line) if line.startswith("[rank") else line for line in printed]


def _last_exception(lines: Sequence[str]) -> list[_Traceback]:
    """Return, in order, the tracebacks of the last exception and of the exceptions that it is chained to or quotes."""
    exceptions = list[list[_Traceback]]()
    for header in (number for number, line in enumerate(lines) if _HEADER in line):
        named = _exception_line(lines, header)
        if named is None:
            continue
        between = lines[exceptions[-1][-1][1] + 1 : header] if exceptions else []
        if exceptions and (not _OWN_HEADER.match(lines[header]) or any(map(_CHAINED.match, between))):
            exceptions[-1].append((header, named))
        else:
            exceptions.append([(header, named)])
    ending = [each for each in exceptions if not _DOES_NOT_END.match(lines[max(0, each[0][0] - 1)])]
    return (ending or exceptions or [[]])[-1]


def _exception_line(lines: Sequence[str], header: int) -> int | None:
    """Return the number of the line that names the exception of the traceback at `header`; None without such a line."""
    indentation = _indentation(lines[header])
    for number in range(header + 1, len(lines)):
        own = _indentation(lines[number])
        if own <= indentation and _EXCEPTION.match(lines[number], own):
            return number
        if _HEADER in lines[number]:
            break
    return None


def _indentation(line: str) -> int:
    margin = _MARGIN.match(line)
    return margin.end() if margin else 0


def _message(lines: Sequence[str], number: int) -> str:
    """Return the message that begins on line `number`. A line that ends with a colon continues on the next line."""
    text = lines[number][_indentation(lines[number]) :].strip()
    for line in lines[number + 1 :]:
        if not text.endswith(":") or _HEADER in line:
            break
        text = f"{text} {line[_indentation(line) :].strip()}".strip()
    return text
