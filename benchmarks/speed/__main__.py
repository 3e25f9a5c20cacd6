"""Training speed on two CPU ranks: this trainer, a loop by hand, torchvision's style, timm, Lightning and Accelerate.

    .venv/bin/python -m benchmarks.speed

Trains ResNet-18 and small-cnn (the same module in all loops) at 64 pixels on one batch in memory and on JPEG files like
photographs (in the page cache). Each loop has two ranks over gloo, a rank and its loader worker share one core. All
loops of a case are alive and train in turns; a ratio compares turns of the same round. Then all are started again,
because starts differ. All run in the rivals' Python, with this working tree's code, and need 12 GiB of memory.

What they have in common: float32, channels_last, batch size, SGD with momentum, DDP, one thread and one loader worker a
rank, random resized crops, mirroring and normalisation. Ours runs as in a job: metrics, heartbeats, and flags
exchanged with the other rank, but without snapshots. The rivals do nothing of that; Lightning logs to nothing.

- images/s: of both ranks, the median over the turns. Batches that were made before a turn are trained on before its
  clock starts.
- page faults: of a rank in a step, the median over the turns. They explain why starts of a loop differ
  (`training/engine/freed_memory.py`).
- MiB: the highest memory of a rank and its worker while they train: anonymous and shared memory, no libraries' code.

In memory, ours turns bytes into normalised floats in each step, as it does for a GPU; the others' batch consists of
floats. From JPEGs, the others' loader workers make the floats.
"""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import (
    Contender,
    Findings,
    RivalFlags,
    Row,
    Sample,
    benchmark,
    say,
    spread,
    take_turns,
    versions,
)
from benchmarks.photos import CLASSES, make_folder
from benchmarks.speed.loops import SMALL_CNN, Case
from benchmarks.speed.rank import LOOPS, OURS, RANKS
from benchmarks.speed.ranks import NoAnswerError, Ranks

SYNTHETIC, JPEG, PACKED = "in memory", "JPEG", "packed"
BY_HAND = "hand-written"
_LIBRARIES = ("torch", "torchvision", "timm", "lightning", "accelerate", "pillow")
# Names of each JPEG: torch's loader begins anew with each epoch. Ours does not, and packed images have as many bytes as
# pixels.
_NAMES, _PACKED_NAMES = 80, 4
# A loader worker may hang in its fork (python/cpython#112275).
_MOST_HUNG_STARTS = 3


@dataclass(frozen=True, kw_only=True)
class Options(RivalFlags):
    """How much to measure."""

    models: tuple[str, ...] = (SMALL_CNN, "resnet18")
    """Models to train."""
    images: tuple[str, ...] = (SYNTHETIC, JPEG)
    """Kinds of images: `in memory`, `JPEG`."""
    loops: tuple[str, ...] = LOOPS
    """Loops to compare."""
    seconds: float = 2.0
    """Seconds of each turn."""
    turns: int = 2
    """Turns of each loop after a start."""
    starts: int = 2
    """Starts of each loop."""
    photos: int = 500
    """Different JPEGs, each under 80 names; packed, under 4."""


@dataclass(kw_only=True)
class LoopOnImages:
    """A loop on images of one kind, and what was measured of it."""

    loop: str
    images: str
    case: Case
    samples: list[Sample] = field(default_factory=list)
    """Images per second and page faults, by turn."""
    peak_bytes: int = 0
    ranks: Ranks | None = None
    """Its processes after the last start."""
    seconds_per_step: float = 0.0
    """Seconds of a step in the last turn."""

    @property
    def lead(self) -> int:
        """Steps on batches that its worker has made in advance: two in the queue, one in its hands, one fetched."""
        return 2 * self.case.workers + 2 if self.case.workers else 1

    def start(self, python: Path, directory: Path, stack: contextlib.ExitStack) -> None:
        """Start its ranks, until the stack ends, and wait until they train. Raises NoAnswerError if all starts hang."""
        case = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self.case).items()}
        for number in range(_MOST_HUNG_STARTS + 1):
            made = Path(tempfile.mkdtemp(dir=directory, prefix=f"{self.loop}-"))
            with contextlib.ExitStack() as own:
                self.ranks = own.enter_context(Ranks(python, self.loop, case, made))
                try:
                    self.ranks.wait_for_first_step()
                    self.ranks.turn(self.lead, 2)
                    self.seconds_per_step = self.ranks.turn(0, 4)[0] / 4
                except NoAnswerError as error:
                    say(f"{self.images}, {self.loop}: {error}")
                    if number == _MOST_HUNG_STARTS:
                        raise
                else:
                    stack.push(own.pop_all())
                    return

    def turn(self, seconds: float) -> list[Sample]:
        """Let its ranks train for a while."""
        assert self.ranks is not None  # noqa: S101  # it has been started
        steps = max(2, round(seconds / self.seconds_per_step))
        took, page_faults = self.ranks.turn(self.lead, steps)
        self.seconds_per_step = took / steps
        speed = RANKS * self.case.batch_size / self.seconds_per_step
        return [{"images_per_second": speed, "page_faults": page_faults / steps / RANKS}]

    def look_at_memory(self, seconds: float) -> None:
        """Let its ranks train for a while more, and keep the highest memory."""
        assert self.ranks is not None  # noqa: S101  # as above
        steps = max(2, round(seconds / 2 / self.seconds_per_step))
        self.peak_bytes = max(self.peak_bytes, self.ranks.peak_bytes(steps))


def loops_of(options: Options, model: str, images: str, root: Path) -> list[LoopOnImages]:
    """Return all loops of a case."""
    case = Case(
        model=model, image_size=64, batch_size=64 if model == SMALL_CNN else 32, amp="none",
        # As many as this trainer's generated images have.
        classes=CLASSES if images == JPEG or model == SMALL_CNN else 1000,
    )  # fmt: skip
    if images == JPEG:
        case = replace(case, folder=root / "jpeg", workers=1)
    found = [LoopOnImages(loop=loop, images=images, case=case) for loop in options.loops]
    if images == JPEG:
        found.append(LoopOnImages(loop=OURS, images=PACKED, case=replace(case, packed=root / "packed")))
    return found


def train(options: Options, loops: Sequence[LoopOnImages], directory: Path) -> None:
    """Start all loops, let them take turns, and begin anew."""
    for start in range(options.starts):
        with contextlib.ExitStack() as stack:
            for each in loops:
                each.start(options.rivals, directory, stack)
            contenders = [
                Contender(name=f"{each.loop}, {each.images}", turn=partial(each.turn, options.seconds))
                for each in loops
            ]
            found = take_turns(contenders, options.turns)
            for each in loops:
                each.samples += found[f"{each.loop}, {each.images}"]
                each.look_at_memory(options.seconds)
        say(f"start {start + 1} of {options.starts}")


def rows_of(loops: Sequence[LoopOnImages]) -> list[Row]:
    """Return a row for each loop of a case."""

    def speeds(each: LoopOnImages) -> list[float]:
        return [sample["images_per_second"] for sample in each.samples]

    by_hand = next((speeds(each) for each in loops if each.loop == BY_HAND), speeds(loops[0]))
    found = list[Row]()
    for each in loops:
        ratios = [mine / theirs for mine, theirs in zip(speeds(each), by_hand, strict=True)]
        found.append({
            "model": each.case.model, "images": each.images, "loop": each.loop,
            "images_per_second": round(median(speeds(each)), 1), **spread(speeds(each), 1),
            "by_hand_written": round(median(ratios), 3),
            "least_ratio": round(min(ratios), 3), "most_ratio": round(max(ratios), 3),
            "page_faults_a_step": round(median(sample["page_faults"] for sample in each.samples)),
            "mib": round(each.peak_bytes / 2**20), "turns": each.samples,
        })  # fmt: skip
    return found


def make_data(options: Options, root: Path) -> None:
    """Make JPEGs, and the same packed."""
    make_folder(root / "jpeg", options.photos * _NAMES, _NAMES)
    for link in (root / "jpeg").glob(f"*/*-[0-{_PACKED_NAMES - 1}].jpg"):
        few = root / "few" / link.relative_to(root / "jpeg")
        few.parent.mkdir(parents=True, exist_ok=True)
        few.hardlink_to(link)
    pack = [sys.executable, "-m", "training.pack", str(root / "few"), str(root / "packed")]
    subprocess.run(pack, check=True, stdout=sys.stderr)


def measure(options: Options) -> Findings:
    """Let all loops of each case train."""
    environment: dict[str, Any] = dict(versions(options.rivals, _LIBRARIES))
    rows = list[Row]()
    with tempfile.TemporaryDirectory(prefix="torchrelay-speed-") as directory:
        root = Path(directory)
        if JPEG in options.images:
            make_data(options, root)
        for model in options.models:
            for images in options.images:
                say(f"{model}, {images}")
                loops = loops_of(options, model, images, root)
                train(options, loops, root)
                rows += rows_of(loops)
    return Findings(tables={"rows": rows}, more={"rivals": environment})


if __name__ == "__main__":
    small = {"models": (SMALL_CNN,), "seconds": 0.3, "starts": 1, "photos": 20}
    benchmark("speed", Options(), measure, small=small, packages=("torch",))
