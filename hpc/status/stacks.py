"""Groups ranks that hung or crashed by where they stood, from the stacks in their logs. Runs on the login node.

Python's faulthandler prints the stacks of all threads if a rank gets SIGABRT, as in a hang, or crashes in C code.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from hpc.run.causes import Cause
from hpc.run.events.history import History
from hpc.run.events.kinds import AttemptEnded, Event, Interrupted, RankFailed
from hpc.run.rundir import RunDir
from hpc.status.log_reader import Tail, origin_of

_ERROR = "Fatal Python error: "
_FRAME = re.compile(r'  File ".*", line .* in ')
# A rank is a fork of torchrun: from this frame outwards, its stack is that of every rank.
_STARTS_THE_PROGRAM = re.compile(r'/jobs/ranks/((script/)?forked_script|process_wrapper)\.py", line ')
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
    """Group the ranks of an attempt by their stacks in the last hang or crash. Ranks without a stack come last.

    By default, it is the last attempt in which a rank has printed a stack. The list is empty if there is none.
    """
    events = History.load(run).events
    failed = {event.attempt or 0 for event in events if isinstance(event, RankFailed | Interrupted) or _is_hang(event)}
    for number in sorted(failed, reverse=True) if attempt is None else [attempt]:
        logs = {int(origin_of(path)["rank"] or 0): path for path in run.attempt_logs(number).glob("rank-[0-9]*.log")}
        found = {rank: _last_stack(path) for rank, path in sorted(logs.items())}
        # A rank with fewer errors than others has printed no stack in the last hang: it was stopped, say.
        last = max((count for count, _ in found.values()), default=0)
        groups = defaultdict[tuple[str, ...], list[int]](list)
        for rank, (count, stack) in found.items():
            groups[stack if count == last else ()].append(rank)
        missing = groups.pop((), [])
        if groups:
            alike = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
            return [
                *(StackGroup(attempt=number, ranks=ranks, stack=list(stack)) for stack, ranks in alike),
                *([StackGroup(attempt=number, ranks=missing, stack=None)] if missing else []),
            ]
    return []


def _is_hang(event: Event) -> bool:
    return isinstance(event, AttemptEnded) and event.cause == Cause.HANG


def _last_stack(log: Path) -> tuple[int, tuple[str, ...]]:
    """Return how often a rank was ended with stacks in its log, and the last time's: of the thread that ended it.

    The frames are innermost first; there are none if it was never ended so.
    """
    count, frames, is_current = 0, list[str](), False
    for line in Tail(log).lines(ended=True):
        if _ERROR in line:
            count, frames = count + 1, []
        elif is_current and line.strip() == "Garbage-collecting":
            continue
        elif is_current and _FRAME.match(line) and not _STARTS_THE_PROGRAM.search(line):
            frames.append(line.strip())
            continue
        # Python 3.14 prints the thread's name after its number. A script may print its own stacks later.
        is_header = line.startswith("Current thread ") and line.endswith("(most recent call first):")
        is_current = is_header and count > 0 and not frames
    while frames and _RUNPY in frames[-1]:
        frames.pop()
    return count, tuple(frames)
