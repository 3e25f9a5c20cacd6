"""Training speed on two CPU ranks: this trainer, a loop by hand, torchvision's style, timm, Lightning and Accelerate.

    .venv/bin/python -m benchmarks.speed

Trains ResNet-18 and small-cnn (the same module in all loops) at 64 pixels on one batch in memory and on JPEG files like
photographs (in the page cache). Each loop has two ranks over gloo; a rank and its loader worker share one core. The
loops of a case take turns, and a ratio compares turns of the same round. Each turn starts its loop anew, because starts
differ. All run in the rivals' Python, with this working tree's code.

What they have in common: float32, channels_last, batch size, SGD with momentum, DDP, one thread and one loader worker a
rank, random resized crops, mirroring and normalisation. Ours runs as in a job: metrics, heartbeats, and flags
exchanged with the other rank, but without snapshots. The rivals do nothing of that; Lightning logs to nothing.

- images/s: of both ranks, the median over the turns, after a warm-up.
- page faults: of rank 0 in a step, the median over the turns. They explain why starts of a loop differ
  (`training/data/loader.py`).
- MiB: the highest memory of rank 0 and its worker while they train: anonymous and shared memory, no libraries' code.

In memory, ours turns bytes into normalised floats in each step, as it does for a GPU; the others' batch consists of
floats. From JPEGs, the others' loader workers make the floats.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness import (
    ROOT,
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
from benchmarks.processes import descendants, memory_bytes
from benchmarks.speed.loops import SMALL_CNN, Case
from benchmarks.speed.rank import LOOPS, OURS, RANKS
from hpc.base.transport import pick_port

SYNTHETIC, JPEG, PACKED = "in memory", "JPEG", "packed"
BY_HAND = "hand-written"
_LIBRARIES = ("torch", "torchvision", "timm", "lightning", "accelerate", "pillow")
# Names of each JPEG: torch's loader begins anew with each epoch. Ours does not, and packed images have as many bytes as
# pixels.
_NAMES, _PACKED_NAMES = 80, 4
_PATIENCE_SECONDS = 120.0
# A loader worker may hang in its fork (python/cpython#112275).
_MOST_STARTS = 4
_MEMORY_LOOKS, _LOOK_SECONDS = 20, 0.05


@dataclass(frozen=True, kw_only=True)
class Options(RivalFlags):
    """How much to measure."""

    models: tuple[str, ...] = (SMALL_CNN, "resnet18")
    """Models to train."""
    loops: tuple[str, ...] = LOOPS
    """Loops to compare."""
    seconds: float = 2.0
    """Seconds of each turn."""
    turns: int = 4
    """Turns of each loop."""
    photos: int = 500
    """Different JPEGs, each under 80 names; packed, under 4."""


@dataclass(frozen=True, kw_only=True)
class LoopOnImages:
    """A loop, and the images that it trains on."""

    loop: str
    images: str
    case: Case

    @property
    def name(self) -> str:
        """Both names."""
        return f"{self.loop}, {self.images}"

    def turn(self, python: Path, seconds: float) -> list[Sample]:
        """Start the ranks, and return what rank 0 measures. Starts them again if one of them hangs."""
        for _ in range(_MOST_STARTS):
            with (
                tempfile.TemporaryDirectory(prefix="torchrelay-speed-") as made,
                self._ranks(python, seconds, Path(made)) as rank_zero,
            ):
                assert rank_zero.stdout is not None  # noqa: S101  # it is a pipe
                if not select.select([rank_zero.stdout], [], [], seconds + _PATIENCE_SECONDS)[0]:
                    say(f"{self.name}: no answer; once more")
                    continue
                if not (line := rank_zero.stdout.readline()):
                    raise SystemExit(f"{self.name} has ended:\n{Path(made, 'log').read_text()[-4000:]}")
                speed = RANKS * self.case.batch_size / (report := json.loads(line))["seconds_per_step"]
                peak = max(_memory_of(rank_zero.pid) for _ in range(_MEMORY_LOOKS))
                return [{"images_per_second": speed, "page_faults": report["page_faults"], "mib": peak / 2**20}]
        raise SystemExit(f"{self.name} hung {_MOST_STARTS} times")

    @contextmanager
    def _ranks(self, python: Path, seconds: float, directory: Path) -> Iterator["subprocess.Popen[str]"]:
        """Start all ranks as torchrun does, yield rank 0, and kill them with their loader workers."""
        (directory / "node").mkdir(mode=0o700)
        words = [self.loop, str(directory), str(seconds), json.dumps(asdict(self.case))]
        fixed = {
            "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_PORT": str(pick_port()),
            "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        with (directory / "log").open("a") as log:
            ranks = [
                subprocess.Popen(
                    [python, "-m", "benchmarks.speed.rank", *words], cwd=directory, text=True, start_new_session=True,
                    env=os.environ | fixed | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE if rank == 0 else log, stderr=log,
                )
                for rank in range(RANKS)
            ]  # fmt: skip
        try:
            yield ranks[0]
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.communicate()


def _memory_of(pid: int) -> int:
    """Return the memory of a rank and its workers, without the code of libraries, which all processes share."""
    time.sleep(_LOOK_SECONDS)
    return memory_bytes((pid, *descendants(pid)), "Pss_Anon", "Pss_Shmem")


def loops_of(options: Options, model: str, images: str, root: Path) -> list[LoopOnImages]:
    """Return all loops of a case."""
    case = Case(
        model=model, image_size=64, batch_size=64 if model == SMALL_CNN else 32, amp="none",
        # As many as this trainer's generated images have.
        classes=CLASSES if images == JPEG or model == SMALL_CNN else 1000,
    )  # fmt: skip
    if images == JPEG:
        case = replace(case, folder=str(root / "jpeg"), workers=1)
    found = [LoopOnImages(loop=loop, images=images, case=case) for loop in options.loops]
    if images == JPEG:
        found.append(LoopOnImages(loop=OURS, images=PACKED, case=replace(case, packed=str(root / "packed"))))
    return found


def train(options: Options, loops: Sequence[LoopOnImages]) -> list[Row]:
    """Let the loops of a case take turns, and return a row for each."""
    contenders = {each.name: partial(each.turn, options.rivals, options.seconds) for each in loops}
    samples = take_turns(contenders, options.turns)
    return rows_of({each: samples[each.name] for each in loops})


def rows_of(found: dict[LoopOnImages, list[Sample]]) -> list[Row]:
    """Return a row for each loop of a case."""
    speeds = {each: [sample["images_per_second"] for sample in samples] for each, samples in found.items()}
    by_hand = next((speed for each, speed in speeds.items() if each.loop == BY_HAND), next(iter(speeds.values())))
    return [
        {
            "model": each.case.model, "images": each.images, "loop": each.loop,
            "images_per_second": round(median(speeds[each]), 1), **spread(speeds[each], 1),
            "by_hand_written": round(median(a / b for a, b in zip(speeds[each], by_hand, strict=True)), 3),
            "page_faults_a_step": round(median(sample["page_faults"] for sample in samples)),
            "mib": round(max(sample["mib"] for sample in samples)), "turns": samples,
        }
        for each, samples in found.items()
    ]  # fmt: skip


def measure(options: Options) -> Findings:
    """Let all loops of each case train."""
    rivals = versions(options.rivals, _LIBRARIES)
    rows = list[Row]()
    with tempfile.TemporaryDirectory(prefix="torchrelay-speed-") as directory:
        root = Path(directory)
        make_folder(root / "jpeg", options.photos * _NAMES, _NAMES)
        make_folder(root / "few", options.photos * _PACKED_NAMES, _PACKED_NAMES)
        pack = [sys.executable, "-m", "training.pack", str(root / "few"), str(root / "packed")]
        subprocess.run(pack, check=True, stdout=sys.stderr)
        for model in options.models:
            for images in (SYNTHETIC, JPEG):
                say(f"{model}, {images}")
                rows += train(options, loops_of(options, model, images, root))
    return Findings(tables={"rows": rows}, more={"rivals": rivals})


if __name__ == "__main__":
    small = {"models": (SMALL_CNN,), "seconds": 0.3, "turns": 1, "photos": 20}
    benchmark("speed", Options, measure, small=small, packages=("torch",))
