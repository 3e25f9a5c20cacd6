"""Groups ranks that hung or crashed by where they stood, from the stacks in their logs. Runs on the login node.

Python's faulthandler prints the stacks of all threads if a rank gets SIGABRT, as in a hang, or crashes in C code.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from hpc.run.rundir import RunDir
from hpc.status.log_reader import Tail, offset_of_last, origin_of

_ERROR = "Fatal Python error: "
_FRAME = re.compile(r'  File ".*", line .* in ')
# A rank is a fork of torchrun: from this frame outwards, its stack is that of every rank.
_STARTS_THE_PROGRAM = re.compile(r'/jobs/ranks/(forked_script|process_wrapper)\.py", line ')
_RUNPY = 'File "<frozen runpy>", line '


@dataclass(frozen=True, kw_only=True)
class StackGroup:
    """Ranks of one attempt whose threads had the same stack when they were ended."""

    attempt: int
    ranks: list[int]
    stack: list[str] | None
    """The frames of the thread that ended the rank, usually the main thread, innermost first, down to the program's own
    first frame; None if the rank has printed no stack."""

    @property
    def who(self) -> str:
        """The ranks in a few words, such as `ranks 0-2, 5`."""
        spans = list[list[int]]()
        for rank in self.ranks:
            if spans and rank == spans[-1][1] + 1:
                spans[-1][1] = rank
            else:
                spans.append([rank, rank])
        text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
        return f"rank {text}" if len(self.ranks) == 1 else f"ranks {text}"


def stack_groups(run: RunDir, attempt: int | None = None) -> list[StackGroup]:
    """Group the ranks of an attempt by their last stacks; ranks without a stack are the last group.

    By default, this is the last attempt in which a rank has printed a stack. The list is empty if there is none.
    """
    logs = defaultdict[int, dict[int, Path]](dict)
    for path in run.logs.glob("attempt-[0-9]*/rank-[0-9]*.log"):
        origin = origin_of(path)
        logs[int(origin["attempt"] or 0)][int(origin["rank"] or 0)] = path
    for number in sorted(logs, reverse=True) if attempt is None else [attempt]:
        groups = defaultdict[tuple[str, ...], list[int]](list)
        for rank, path in sorted(logs[number].items()):
            groups[last_stack(path)].append(rank)
        if any(groups):
            missing = groups.pop((), [])
            found = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
            return [
                *(StackGroup(attempt=number, ranks=ranks, stack=list(stack)) for stack, ranks in found),
                *([StackGroup(attempt=number, ranks=missing, stack=None)] if missing else []),
            ]
    return []


def last_stack(log: Path) -> tuple[str, ...]:
    """Return the frames, innermost first, of the thread that ended a rank; empty if the log has no stack."""
    offset = offset_of_last(log, _ERROR)
    if offset is None:
        return ()
    frames, is_current = [], False
    for line in Tail(log, offset).lines(ended=True):
        if is_current and (not _FRAME.match(line) or _STARTS_THE_PROGRAM.search(line)):
            break
        if is_current:
            frames.append(line.strip())
        # Python 3.14 prints the thread's name after its number.
        is_current = is_current or (line.startswith("Current thread ") and line.endswith("(most recent call first):"))
    while frames and _RUNPY in frames[-1]:
        frames.pop()
    return tuple(frames)
