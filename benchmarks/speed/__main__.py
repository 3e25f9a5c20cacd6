"""Training speed on two CPU ranks: this trainer, a loop by hand, torchvision's style, timm, Lightning and Accelerate.

    .venv/bin/python -m benchmarks.speed

Trains ResNet-18 and small-cnn (the same module in all loops) at 64 pixels on one batch in memory and on JPEG files like
photographs (500 x 375 pixels, in the page cache). Each loop has two ranks over gloo, a rank and its loader worker share
one core. All loops of a case are alive and train in turns, so that a machine which slows down does so for all of them;
a ratio compares turns of the same round. Then all are started again, because starts differ. All run in the rivals'
Python, with this working tree's code.

What they have in common: float32, channels_last, batch size, SGD with momentum, DDP, one thread and one loader worker a
rank, random resized crops, mirroring and normalisation. Ours runs as in a job: metrics, heartbeats, and flags
exchanged with the other rank, but without snapshots. The rivals do nothing of that; Lightning logs to nothing.

- images/s: of both ranks, the median over the rounds. Batches that were made before a turn are trained on before its
  clock starts.
- CPU ms: processor time for an image, of ranks and workers together: what other programs disturb least.
- waiting: the share of the time in the loader.
- page faults: of a rank in a step, the median over the turns. They explain why starts of a loop differ
  (`training/engine/freed_memory.py`).
- MiB: the highest memory of a rank and its worker while they train: anonymous and shared memory, no libraries' code.
- first step: seconds from the start of the rank's process to the end of its first step, of the slower rank; and the
  processor time in it. What torchrun takes before that is the same for all.

In memory, ours turns bytes into normalised floats in each step, as it does for a GPU; the others' batch consists of
floats. From JPEGs, the others' loader workers make the floats.

Prints a table and the goals, and writes `benchmarks/results/speed.json`. Takes 12 GiB of memory, because
all loops of a case are alive at once; `--small` takes a minute, and then its numbers say nothing.
"""

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tyro

from benchmarks import record
from benchmarks.loader import CLASSES, make_folder
from benchmarks.speed.loops import SMALL_CNN, Case
from benchmarks.speed.rank import LOOPS, OURS, RANKS
from benchmarks.speed.ranks import FirstStep, NoAnswerError, Ranks, Turn

SYNTHETIC, JPEG, PACKED = "in memory", "JPEG", "packed"
BY_HAND = "hand-written"
_LIBRARIES = ("torch", "torchvision", "timm", "lightning", "accelerate", "pillow")
# A ratio this far below 1 is within the noise.
_NOISE = 0.02
_JPEG_GOAL = 1.5
# Names of each JPEG: torch's loader begins anew with each epoch. Ours does not, and packed images have as many bytes as
# pixels.
_NAMES, _PACKED_NAMES = 80, 4
_MOST_HUNG_STARTS = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    rivals: Path = record.RIVALS
    """Python of an environment with the dependency group `rivals`, which runs all loops."""
    models: tuple[str, ...] = (SMALL_CNN, "resnet18")
    images: tuple[str, ...] = (SYNTHETIC, JPEG)
    """Kinds of images: `in memory`, `JPEG`."""
    loops: tuple[str, ...] = LOOPS
    seconds: float = 2.0
    """Of each turn."""
    rounds: int = 2
    """Turns of each loop after a start."""
    starts: int = 2
    """Starts of each loop."""
    photos: int = 500
    """Different JPEGs, each under 80 names; packed, under 4."""
    small: bool = False
    """Two short turns with small-cnn, and no file of results."""
    write: bool = True
    """Write the JSON file."""


@dataclass(kw_only=True)
class Contender:
    """A loop on images of one kind, and what was measured of it."""

    loop: str
    images: str
    case: Case
    first_steps: list[FirstStep] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    peak_bytes: int = 0
    hung_starts: int = 0
    """Starts without a first step: a loader worker may hang in its fork (python/cpython#112275)."""

    @property
    def speeds(self) -> list[float]:
        """Images per second, by turn."""
        return [RANKS * self.case.batch_size * turn.steps / turn.seconds for turn in self.turns]

    @property
    def cpu_ms(self) -> list[float]:
        """Milliseconds of processor time for an image, by turn."""
        return [1000 * turn.cpu_seconds / (RANKS * self.case.batch_size * turn.steps) for turn in self.turns]

    @property
    def lead(self) -> int:
        """Steps on batches that its worker has made in advance: two in the queue, one in its hands, one fetched."""
        return 2 * self.case.workers + 2 if self.case.workers else 1

    def start(self, python: Path, directory: Path, stack: contextlib.ExitStack) -> Ranks:
        """Start its ranks, until the stack ends, and wait for their first step. Raises NoAnswerError if all hang."""
        number = len(self.first_steps) + self.hung_starts
        name = f"{self.case.model}-{self.images}-{self.loop}-{number}".replace(" ", "-")
        case = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self.case).items()}
        with contextlib.ExitStack() as own:
            ranks = own.enter_context(Ranks(python, self.loop, case, directory / name))
            try:
                self.first_steps.append(ranks.first_step())
            except NoAnswerError as error:
                print(f"  {self.images}, {self.loop}: {error}", file=sys.stderr)
                self.hung_starts += 1
                if self.hung_starts > _MOST_HUNG_STARTS:
                    raise
            else:
                stack.push(own.pop_all())
                return ranks
        return self.start(python, directory, stack)


def contenders(options: Options, model: str, images: str, root: Path) -> list[Contender]:
    """All loops of a case."""
    case = Case(
        model=model, image_size=64, batch_size=64 if model == SMALL_CNN else 32, amp="none",
        # As many as this trainer's generated images have.
        classes=CLASSES if images == JPEG or model == SMALL_CNN else 1000,
    )  # fmt: skip
    if images == JPEG:
        case = replace(case, folder=root / "jpeg", workers=1)
    found = [Contender(loop=loop, images=images, case=case) for loop in options.loops]
    if images == JPEG:
        found.append(Contender(loop=OURS, images=PACKED, case=replace(case, packed=root / "packed")))
    return found


def measure(options: Options, todo: Sequence[Contender], directory: Path) -> None:
    """Start all loops, let them take turns, and begin anew."""
    for start in range(options.starts):
        with contextlib.ExitStack() as stack:
            started = []
            for each in todo:
                ranks = each.start(options.rivals, directory, stack)
                ranks.turn(each.lead, 2)
                started.append((each, ranks, ranks.turn(0, 4)))
            for number in range(options.rounds):
                # A loop does not always follow the same one.
                place = number % len(started)
                for each, ranks, before in started[place:] + started[:place]:
                    last = each.turns[-1] if each.turns else before
                    steps = max(2, round(options.seconds / (last.seconds / last.steps)))
                    each.turns.append(ranks.turn(each.lead, steps))
            for each, ranks, _ in started:
                each.peak_bytes = max(each.peak_bytes, ranks.peak_bytes(max(2, each.turns[-1].steps // 2)))
        print(f"  start {start + 1} of {options.starts}", file=sys.stderr)


def rows(measured: Sequence[Contender]) -> list[dict[str, Any]]:
    """One for each contender of a case."""
    by_hand = next((each.speeds for each in measured if each.loop == BY_HAND), None)
    found = []
    for each in measured:
        ratios = [mine / theirs for mine, theirs in zip(each.speeds, by_hand or each.speeds, strict=True)]
        found.append(
            {
                "model": each.case.model,
                "images": each.images,
                "loop": each.loop,
                "images_per_second": round(statistics.median(each.speeds), 1),
                "least": round(min(each.speeds), 1),
                "most": round(max(each.speeds), 1),
                "by_hand_written": round(statistics.median(ratios), 3) if by_hand else None,
                "least_ratio": round(min(ratios), 3) if by_hand else None,
                "most_ratio": round(max(ratios), 3) if by_hand else None,
                "cpu_ms_per_image": round(statistics.median(each.cpu_ms), 3),
                "page_faults_a_step": round(
                    statistics.median(turn.page_faults / turn.steps / RANKS for turn in each.turns)
                ),
                "waiting": round(statistics.median(turn.wait_share for turn in each.turns), 3),
                "mib": round(each.peak_bytes / 2**20),
                "first_step_seconds": round(statistics.median(start.seconds for start in each.first_steps), 2),
                "hung_starts": each.hung_starts,
                "first_step_cpu_seconds": round(statistics.median(start.cpu_seconds for start in each.first_steps), 2),
            }
        )
    return found


def details_of(each: Contender) -> dict[str, Any]:
    """All that was measured of a contender, ready for JSON."""
    case = asdict(replace(each.case, folder=None, packed=None))
    return {**asdict(each), "case": case}


def goals(table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours against the loop by hand, on images of each kind."""
    found = []
    for row in table:
        if row["loop"] == OURS and row["images"] in {SYNTHETIC, JPEG} and row["by_hand_written"]:
            goal = 1 - _NOISE if row["images"] == SYNTHETIC else _JPEG_GOAL
            found.append(
                {
                    "goal": f"{row['model']}, {row['images']}: ours by hand-written",
                    "value": row["by_hand_written"],
                    "wanted": "1 within noise" if row["images"] == SYNTHETIC else f"{_JPEG_GOAL}",
                    "met": row["by_hand_written"] >= goal,
                }
            )
    return found


def versions(python: Path) -> dict[str, str | None]:
    """Of the rivals' environment; None: not installed."""
    script = (
        "import json, platform, sys\nfrom importlib.metadata import distributions\n"
        "found = {each.name.lower(): each.version for each in distributions()}\n"
        "print(json.dumps({'python': platform.python_version()} | {name: found.get(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run([python, "-c", script, *_LIBRARIES], check=True, capture_output=True, text=True)
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


def make_data(options: Options, root: Path) -> None:
    """JPEGs, and the same packed."""
    print("making JPEGs", file=sys.stderr)
    make_folder(root / "jpeg", options.photos * _NAMES, _NAMES)
    for link in (root / "jpeg").glob(f"*/*-[0-{_PACKED_NAMES - 1}].jpg"):
        few = root / "few" / link.relative_to(root / "jpeg")
        few.parent.mkdir(parents=True, exist_ok=True)
        few.hardlink_to(link)
    pack = [sys.executable, "-m", "training.pack", str(root / "few"), str(root / "packed")]
    subprocess.run(pack, check=True, stdout=sys.stderr)


def main() -> None:
    """Measure, print and write."""
    options = tyro.cli(Options)
    if options.small:
        options = replace(options, models=(SMALL_CNN,), seconds=0.3, rounds=2, starts=1, photos=20)
    measured_on = record.machine(("torch",))
    environment = versions(options.rivals)
    table: list[dict[str, Any]] = []
    details: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="torchrelay-speed-") as directory:
        root = Path(directory)
        if JPEG in options.images:
            make_data(options, root)
        for model in options.models:
            for images in options.images:
                print(f"{model}, {images}", file=sys.stderr)
                todo = contenders(options, model, images, root)
                measure(options, todo, root / "runs")
                table += rows(todo)
                details += [
                    {**asdict(each), "case": {**asdict(each.case), "folder": None, "packed": None}} for each in todo
                ]
    print("rivals' environment:", ", ".join(f"{name} {version}" for name, version in environment.items()))
    print(record.table(table))
    reached = goals(table)
    print(record.table(reached))
    if options.write and not options.small:
        settings = {"options": {**asdict(options), "rivals": options.rivals.name}, "rivals": environment}
        record.write("speed", measured_on, table, goals=reached, details=details, **settings)


if __name__ == "__main__":
    main()
