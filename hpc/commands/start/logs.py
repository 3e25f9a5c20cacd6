"""`hpc logs`: print the output of a run's ranks and agents, over all attempts. Runs on the login node."""

import io
import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial

from hpc.base.errors import UserError
from hpc.base.text import visible
from hpc.commands import cli
from hpc.run.causes import is_consequence
from hpc.run.events.history import History
from hpc.run.events.kinds import AttemptEnded, RankFailed
from hpc.run.restart_budget import FINAL_CAUSES
from hpc.run.rundir import RunDir
from hpc.status.log_reader import Line, LogReader, lines_before, offset_of_last
from hpc.status.run_view import StatusCache
from hpc.status.stacks import stack_groups
from hpc.status.summary import TERMINAL

_POLL_SECONDS = 0.5
_STATE_SECONDS = 3.0
_MAX_BYTES = 2**20
_LINES_BEFORE = 40


@dataclass(frozen=True, kw_only=True)
class LogsOptions(cli.RunOptions):
    """Print the logs of a run. Each line shows its attempt and its rank.

    For a failed run, this is the log of the rank that failed first, from shortly before its error. Of a long log, only
    the last megabyte is printed. --all and --json print everything.
    """

    follow: bool = False
    """Print new lines as they are written, also after requeues, until the run ends or you press Ctrl-C."""
    rank: int | None = None
    """Print only the log of this rank."""
    attempt: int | None = None
    """Print only the logs of this attempt. Default: all attempts."""
    all: bool = False
    """Print the logs in full, from the beginning."""
    stacks: bool = False
    """Print where the ranks were in the last hang or crash: their stacks, with equal ones together."""


def logs(options: LogsOptions) -> int:
    """Print the logs; with --follow, also new lines."""
    run = cli.find_run(options.run, options.runs_dir)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # ranks may print what the terminal cannot show
    if options.stacks:
        return _print_stacks(options, run)
    reader = reader_for(options, run)
    if options.follow:
        _follow(options, reader)
    elif options.json:
        # The list is printed as it is read: it may be larger than the memory.
        separator = "["
        for line in reader.new_lines(ended=True):
            print(separator + json.dumps(cli.versioned(line)), end="")
            separator = ",\n"
        print("[]" if separator == "[" else "]")
    else:
        line = None
        for line in reader.new_lines(ended=True):
            print(_for_people(line))
        if line is None:
            _notice(f"run {run.name} has no such log yet: see hpc status {run.name}, or the files in {run.logs}")
    if reader.shortened:
        _notice("only the ends of long logs are shown: --all shows everything")
    return 0


def reader_for(options: LogsOptions, run: RunDir) -> LogReader:
    """Return a reader of the logs to print. For a failed run it starts shortly before the run's first error."""
    if options.all or options.json:
        return LogReader(run, options.rank, options.attempt)
    chosen = options.rank is not None or options.attempt is not None
    error = None if chosen else first_error(History.load(run))
    if error is None or not (path := run.rank_log(error.attempt or 0, error.rank or 0)).exists():
        return LogReader(run, options.rank, options.attempt, _MAX_BYTES)
    node = f" on {error.node}" if error.node else ""
    _notice(
        f"attempt {error.attempt} failed; first failure: rank {error.rank}{node} ({error.cause}). "
        "This is the end of its log; --all shows everything"
    )
    reader = LogReader(run, error.rank, error.attempt, _MAX_BYTES)
    found = offset_of_last(path, error.detail) if error.detail else None
    if found is not None:
        reader.start_at(path, lines_before(path, found, _LINES_BEFORE))
    return reader


def first_error(history: History) -> RankFailed | AttemptEnded | None:
    """Return the first failure of a rank in a failed run's last attempt. None for other runs, or if no rank failed."""
    last = history.last_attempt
    if last is None or last.cause is None or last.cause in FINAL_CAUSES or history.may_restart:
        return None
    own = history.during(last.attempt)
    [ended, *_], failed = own.of(AttemptEnded), own.of(RankFailed)
    named = [event for event in failed if event.rank == ended.rank][-1:]
    # The ranks may have been restarted in place: only the failures of the last round count.
    last_round = [event for event in failed if event.round == failed[-1].round]
    # A rank that fails because another rank died may be noticed first.
    last_round.sort(key=lambda event: (is_consequence(event.detail or ""), event.failed_at))
    return next(iter(named or last_round), ended if ended.rank is not None else None)


def _print_stacks(options: LogsOptions, run: RunDir) -> int:
    if options.follow or options.rank is not None:
        raise UserError("--stacks compares all ranks: omit --follow and --rank")
    groups = stack_groups(run, options.attempt)
    if options.json:
        cli.print_json([asdict(group) for group in groups])
        return 0
    for group in groups:
        print(f"attempt {group.attempt}, {group.who}" + (" (most recent call first):" if group.stack else ": no stack"))
        for frame in group.stack or ():
            print(f"  {visible(frame)}")
    if not groups:
        _notice(f"no rank of run {run.name} has printed a stack: hpc logs {run.name} shows what they have printed")
    return 0


def _follow(options: LogsOptions, reader: LogReader) -> None:
    """Print new lines until the run has ended. With --json, print one document per line."""
    cache, polled, ended = StatusCache(), 0.0, False
    while not ended:
        if time.monotonic() - polled > _STATE_SECONDS:
            ended = cache.summary(reader.run).state in TERMINAL
            polled = time.monotonic()
        for line in reader.new_lines(ended=ended):
            print(json.dumps(cli.versioned(line)) if options.json else _for_people(line))
        sys.stdout.flush()
        time.sleep(0 if ended else _POLL_SECONDS)


def _for_people(line: Line) -> str:
    *origin, _, text = line.values()
    return f"[{':'.join(map(str, origin))}] {visible(str(text))}"


def _notice(text: str) -> None:
    print(f"hpc logs: {visible(text)}", file=sys.stderr, flush=True)


main = partial(cli.run, logs, LogsOptions, "logs")
