"""`hpc logs`: what the ranks and agents of a run printed, over all attempts. Runs on the login node."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from hpc import cli
from hpc.board import Board
from hpc.rundir import RunDir
from hpc.summary import TERMINAL

_POLL_SECONDS = 0.5
_STATE_SECONDS = 3.0
Line = dict[str, int | str]


@dataclass(frozen=True, kw_only=True)
class Logs(cli.Common):
    """Print the logs of a run, each line with its attempt and rank in front."""

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


@dataclass
class Reader:
    """Reads what has been added to the log files since it was asked last."""

    offsets: dict[Path, int] = field(default_factory=dict)

    def new_lines(self, path: Path) -> Iterator[str]:
        """The whole lines that are new in one file."""
        start = self.offsets.get(path, 0)
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.offsets[path] = start + len(whole)
        yield from whole.decode(errors="replace").splitlines()


def main(argv: Sequence[str] | None = None) -> int:
    """The verb."""
    return cli.run(logs, Logs, argv, "logs")


def logs(options: Logs) -> int:
    """Print what there is; with --follow, and what comes."""
    run = cli.find_run(options.run, options.runs_dir)
    reader = Reader()
    if options.follow:
        _follow(options, run, reader)
        return 0
    lines = list(new_lines(options, run, reader))
    if options.json:
        cli.print_json(lines)
        return 0
    for line in lines:
        print(_for_people(line))
    if not lines:
        print(f"run {run.name} has no such log yet: hpc status {run.name}, or look into {run.logs}", file=sys.stderr)
    return 0


def _follow(options: Logs, run: RunDir, reader: Reader) -> None:
    """Print until the run has ended and its last lines are out; with --json one document a line, as there is no end."""
    asked = 0.0
    ended = False
    while not ended:
        if time.monotonic() - asked > _STATE_SECONDS:
            ended = Board().look_at(run)["state"] in TERMINAL
            asked = time.monotonic()
        for line in new_lines(options, run, reader):
            print(json.dumps(line) if options.json else _for_people(line), flush=True)
        time.sleep(0 if ended else _POLL_SECONDS)


def _for_people(line: Line) -> str:
    *origin, text = line.values()
    return f"[{':'.join(str(part) for part in origin)}] {text}"


def new_lines(options: Logs, run: RunDir, reader: Reader) -> Iterator[Line]:
    """The new lines of all chosen files, each with whose it is."""
    for path in log_files(run, options.rank, options.attempt):
        origin = origin_of(path)
        for line in reader.new_lines(path):
            yield {**origin, "line": line}


def log_files(run: RunDir, rank: int | None, attempt: int | None) -> list[Path]:
    """The log files of the chosen ranks and attempts, in their order; without a choice the agents' as well."""
    attempts = "*" if attempt is None else f"{attempt:03d}"
    ranks = "*" if rank is None else f"{rank:02d}"
    agents = sorted(run.logs.glob("*_*_log.out")) if rank is None and attempt is None else []
    return [*agents, *sorted(run.logs.glob(f"attempt-{attempts}/rank-{ranks}.log"))]


def origin_of(path: Path) -> Line:
    """Whose log a file is: a rank's in an attempt, or the agent's of a node in a job (submitit's file name)."""
    if path.suffix == ".out":
        job, node, _ = path.name.split("_")
        return {"agent": f"job {job}", "node": int(node)}
    return {"attempt": int(path.parent.name.removeprefix("attempt-")), "rank": int(path.stem.removeprefix("rank-"))}


if __name__ == "__main__":
    sys.exit(main())
