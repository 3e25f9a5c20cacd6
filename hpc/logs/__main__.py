"""`hpc logs`: what the ranks and agents of a run printed, over all attempts. Runs on the login node."""

import functools
import io
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from hpc import cli
from hpc.core import ledger
from hpc.core.attempts import attempts_of, failures_in_a_row
from hpc.core.ledger import Event
from hpc.core.outcome import FINAL_CAUSES, is_consequence, may_restart
from hpc.core.rundir import RunDir
from hpc.logs.tail import Tail, lines_before, merged, offset_of_last
from hpc.status.run_view import TERMINAL
from hpc.status.status_cache import StatusCache

_POLL_SECONDS = 0.5
_STATE_SECONDS = 3.0
_MOST_BYTES = 2**20
_LINES_BEFORE = 40
Line = dict[str, int | str]


@dataclass(frozen=True, kw_only=True)
class LogsOptions(cli.Common):
    """Print the logs of a run, each line with its attempt and rank in front.

    Of a failed run, the log of the rank that failed first, from shortly before its error. Of a long log the last
    megabyte. With --all or --json everything.
    """

    run: tyro.conf.Positional[str]
    """Run directory or name."""
    runs_dir: Path = Path("runs")
    """Directory of the runs."""
    follow: bool = False
    """Go on as the logs grow, over requeues, until the run ends or Ctrl-C."""
    rank: int | None = None
    """This rank's log only."""
    attempt: int | None = None
    """This attempt's logs only; by default all."""
    all: bool = False
    """Everything, from the beginning."""


@dataclass
class LogReader:
    """The chosen logs of a run, and how far each has been read."""

    run: RunDir
    rank: int | None = None
    attempt: int | None = None
    most_bytes: int | None = None
    """Of each log, not more than its last bytes."""
    shortened: bool = False
    """Whether that left anything out."""
    _tails: dict[Path, Tail] = field(default_factory=dict)
    _over: set[int] = field(default_factory=set)

    def new_lines(self, *, ended: bool = False) -> Iterator[Line]:
        """What has been added since the last time, each line with whose it is; what stood there is read once."""
        attempts = self._attempts()
        # There may be thousands of logs. Ranks of the last attempt but one may still say their last words.
        over = attempts[:-2]
        groups = {0: self._agents(), **{number: self._ranks(number) for number in attempts}}
        for number, paths in groups.items():
            for tail, line in merged(map(self._tail, paths), ended=ended or number in over):
                yield {**origin_of(tail.path), "line": line}
        self._over.update(over)

    def start_at(self, path: Path, offset: int) -> None:
        """Begin to read a log there."""
        self._tails[path] = Tail(path, offset)

    def _attempts(self) -> list[int]:
        """The chosen attempts whose logs may grow, the first one first."""
        found = [int(path.name.removeprefix("attempt-")) for path in self.run.logs.glob("attempt-[0-9]*")]
        return sorted(number for number in found if self.attempt in {number, None} and number not in self._over)

    def _ranks(self, attempt: int) -> list[Path]:
        wanted = "[0-9]*" if self.rank is None else f"{self.rank:02d}"
        found = self.run.attempt_logs(attempt).glob(f"rank-{wanted}.log")
        return sorted(found, key=lambda path: int(path.stem.removeprefix("rank-")))

    def _agents(self) -> list[Path]:
        """Where no rank and no attempt is chosen: an agent's log is that of a job, which may see several attempts."""
        found = self.run.logs.glob("[0-9]*_[0-9]*_log.out") if self.rank is None and self.attempt is None else ()
        return sorted(found, key=lambda path: [int(part) for part in path.name.split("_")[:2]])

    def _tail(self, path: Path) -> Tail:
        if path not in self._tails:
            size = path.stat().st_size if self.most_bytes and path.exists() else 0
            skipped = max(0, size - (self.most_bytes or size))
            self.shortened = self.shortened or skipped > 0
            self.start_at(path, lines_before(path, skipped, 0) if skipped else 0)
        return self._tails[path]


@functools.cache
def origin_of(path: Path) -> Line:
    """Whose log a file is: a rank's in an attempt, or the agent's of a node in a job (submitit's file name)."""
    if path.suffix == ".out":
        job, node, _ = path.name.split("_")
        return {"agent": f"job {job}", "node": int(node)}
    return {"attempt": int(path.parent.name.removeprefix("attempt-")), "rank": int(path.stem.removeprefix("rank-"))}


def main(argv: Sequence[str] | None = None) -> int:
    """The verb."""
    return cli.run(logs, LogsOptions, argv, "logs")


def logs(options: LogsOptions) -> int:
    """Print what there is; with --follow, and what comes."""
    run = cli.find_run(options.run, options.runs_dir)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # ranks may print what the terminal cannot
    reader = reader_for(options, run)
    if options.follow:
        _follow(options, reader)
    elif options.json:
        _print_json(reader.new_lines(ended=True))
    elif not _print_lines(reader.new_lines(ended=True)):
        _say(f"run {run.name} has no such log yet: hpc status {run.name}, or look into {run.logs}")
    if reader.shortened:
        _say("these are the ends of long logs: --all shows them whole")
    return 0


def reader_for(options: LogsOptions, run: RunDir) -> LogReader:
    """What is to be printed, and from where on."""
    if options.all or options.json:
        return LogReader(run, options.rank, options.attempt)
    chosen = options.rank is not None or options.attempt is not None
    error = None if chosen else first_error(ledger.read(run.events))
    if error is None or not (path := run.rank_log(error["attempt"], error["rank"])).exists():
        return LogReader(run, options.rank, options.attempt, _MOST_BYTES)
    where = " on " + error["node"] if error.get("node") else ""
    _say(
        f"attempt {error['attempt']} ended the run, and of its ranks {error['rank']}{where} failed first "
        f"({error['cause']}): this is the end of its log; --all shows everything"
    )
    reader = LogReader(run, error["rank"], error["attempt"], _MOST_BYTES)
    found = offset_of_last(path, error["detail"]) if error.get("detail") else None
    if found is not None:
        reader.start_at(path, lines_before(path, found, _LINES_BEFORE))
    return reader


def first_error(events: Sequence[Event]) -> Event | None:
    """What the first rank to fail in a failed run's last attempt left; None if it has not failed, or no rank did."""
    attempts = attempts_of(events)
    cause = attempts[-1].cause if attempts else None
    if cause is None or cause in FINAL_CAUSES or may_restart(cause, failures_in_a_row(attempts)):
        return None
    own = [event for event in events if event.get("attempt") == attempts[-1].attempt]
    ended = next(event for event in own if event["event"] == "attempt_ended")
    failed = [event for event in own if event["event"] == "rank_failed"]
    # The ranks may have been started several times: what counts is the last of them.
    last = [event for event in failed if event["round"] == failed[-1]["round"]]
    named = [event for event in failed if event["rank"] == ended.get("rank")][-1:]
    told = [ended] if ended.get("rank") is not None else []
    return next(iter(named or sorted(last, key=_order) or told), None)


def _order(failed: Event) -> tuple[bool, float]:
    """Who dies of another rank's death may be seen first."""
    return is_consequence(failed.get("detail") or ""), failed["failed_at"]


def _follow(options: LogsOptions, reader: LogReader) -> None:
    """Print until the run has ended and its last lines are out; with --json one document a line, as there is no end."""
    cache, asked, ended = StatusCache(), 0.0, False
    form = json.dumps if options.json else _for_people
    while not ended:
        if time.monotonic() - asked > _STATE_SECONDS:
            ended = cache.summary(reader.run)["state"] in TERMINAL
            asked = time.monotonic()
        for line in reader.new_lines(ended=ended):
            print(form(line))
        sys.stdout.flush()
        time.sleep(0 if ended else _POLL_SECONDS)


def _print_lines(lines: Iterator[Line]) -> bool:
    """Print them as they are read; whether there were any."""
    line = None
    for line in lines:
        print(_for_people(line))
    return line is not None


def _print_json(lines: Iterator[Line]) -> None:
    """One list, printed as it is read: it may be larger than the memory."""
    separator = "["
    for line in lines:
        print(separator + json.dumps(line), end="")
        separator = ",\n"
    print("[]" if separator == "[" else "]")


def _for_people(line: Line) -> str:
    *origin, text = line.values()
    return f"[{':'.join(str(part) for part in origin)}] {text}"


def _say(text: str) -> None:
    print(f"hpc logs: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
