"""Images per second of our training steps, against a loop by hand, torchvision's style and timm (../speed/loops.py).

The loops of a case train in turns in this process. Ours runs as a user's would, repeatable by default; the others let
cuDNN choose the fastest algorithms. With generated images, ours and the loop by hand also train with the kernels of the
other, and the profile of one step says which operations take the time. With files the rivals read JPEGs. What workers
have made in advance is trained on before the clock starts.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

import torch

from benchmarks.gpu.part import Found, Goal, Row, goal, on_gpu, synchronize
from benchmarks.harness import Sample, spread, take_turns
from benchmarks.photos import CLASSES, make_folder
from benchmarks.speed.loops import RIVALS, Case
from benchmarks.speed.our_loop import ours
from training.config.train_config import TrainConfig
from training.runtime.determinism import configure
from training.runtime.process_group import ProcessGroup, connect, disconnect
from training.runtime.run_context import rank_info_from

CASES = {
    "resnet50": Case(model="resnet50", image_size=224, batch_size=256),
    "resnet50-files": Case(model="resnet50", image_size=224, batch_size=128),
    "resnet18-32px": Case(model="resnet18", image_size=32, batch_size=512),
    "vit-b-16": Case(model="vit_b_16", image_size=224, batch_size=128, optimizer="adamw"),
}
OURS, BY_HAND, SYNTHETIC, PACKED, JPEG = "ours", "hand-written", "synthetic", "packed", "JPEG files"
REPEATABLE, FASTEST = "repeatable", "fastest"
# Names of JPEGs; a quarter of them are different images.
_IMAGES, _SMALL_IMAGES = 2000, 80
# A ratio this far below 1 is within the noise of a machine that others use.
_NOISE = 0.02
_PACKED_SHARE = 0.95
# If repeatable kernels cost ResNet-50 more, they are no good default.
_REPEATABLE_SHARE = 0.95
_SLOWEST = 12


@dataclass(kw_only=True)
class Loop:
    """A loop on images of one kind."""

    images: str
    name: str
    kernels: str
    case: Case
    make: Callable[[], Iterator[None]]
    seconds_per_step: float = 0.0
    """The last time that it was measured."""
    memory_bytes: int = 0
    """The peak that its tensors took of the GPU."""

    def start(self) -> None:
        """Make the first steps, and measure the memory that they take."""
        self._steps = self.make()
        self._use()
        before = torch.cuda.memory_allocated() if on_gpu() else 0
        if on_gpu():
            torch.cuda.reset_peak_memory_stats()
        self._advance(4 + self._made_in_advance)
        self.memory_bytes = torch.cuda.max_memory_allocated() - before if on_gpu() else 0
        self.seconds_per_step = self._advance(4) / 4

    def turn(self, seconds: float) -> list[Sample]:
        """Train for a while."""
        self._use()
        self._advance(self._made_in_advance)
        steps = max(1, int(seconds / self.seconds_per_step))
        self.seconds_per_step = self._advance(steps) / steps
        return [{"images_per_second": self.case.batch_size / self.seconds_per_step}]

    def slowest(self) -> dict[str, float]:
        """Return the milliseconds of the slowest operations of one step on the device, and of the host as `host`."""
        self._use()
        self._advance(1)
        with torch.profiler.profile() as profile:
            self._advance(1)
        events = profile.key_averages()
        found = {each.key: each.self_device_time_total if on_gpu() else each.self_cpu_time_total for each in events}
        slowest = sorted(found, key=lambda key: -found[key])[:_SLOWEST]
        host = sum(each.self_cpu_time_total for each in events)
        return {"host": round(host / 1000, 2), **{key[:60]: round(found[key] / 1000, 2) for key in slowest}}

    @property
    def _made_in_advance(self) -> int:
        """The batches that its workers have ready when its turn comes: torch's loader makes two each."""
        return 2 * self.case.workers + 1

    def _advance(self, steps: int) -> float:
        began = synchronize()
        for _ in islice(self._steps, steps):
            pass
        return synchronize() - began

    def _use(self) -> None:
        """Set torch up for this loop's kernels: by default, the rivals let cuDNN choose the fastest algorithms."""
        configure(TrainConfig(synthetic=True, deterministic="warn" if self.kernels == REPEATABLE else "off"))
        if self.kernels == REPEATABLE and self.case.model.startswith("vit"):
            torch.use_deterministic_algorithms(True)  # as configure_attention


def loops_of(name: str, group: ProcessGroup, root: Path, *, small: bool) -> list[Loop]:
    """Return all loops of a case."""
    case = CASES[name]
    if small:
        case = replace(case, model="squeezenet1_1", image_size=64, batch_size=8, amp="none")

    def loop(images: str, case: Case, name: str = OURS, kernels: str = "") -> Loop:
        kernels = kernels or (REPEATABLE if name == OURS else FASTEST)
        if name == OURS:
            make = partial(ours, case, group, root / f"{images}-{kernels}")
        else:
            make = partial(RIVALS[name], case, group.device)
        return Loop(images=images, name=name, kernels=kernels, case=case, make=make)

    if name != "resnet50-files":
        others = [loop(SYNTHETIC, case, OURS, FASTEST), loop(SYNTHETIC, case, BY_HAND, REPEATABLE)]
        return [*(loop(SYNTHETIC, case, each) for each in (OURS, *RIVALS)), *others]
    make_folder(root / "jpeg", _SMALL_IMAGES if small else _IMAGES)
    subprocess.run([sys.executable, "-m", "training.pack", root / "jpeg", root / "pack"], check=True)
    workers = max(1, len(os.sched_getaffinity(0)) - 1)
    files = replace(case, folder=str(root / "jpeg"), workers=workers, classes=CLASSES)
    packed = replace(files, packed=str(root / "pack"))
    return [loop(SYNTHETIC, case), loop(PACKED, packed), *(loop(JPEG, files, each) for each in (OURS, *RIVALS))]


def train(case: str, loops: list[Loop], *, small: bool) -> list[Row]:
    """Start the loops, let them take turns, and return a row for each."""
    started = list[Loop]()
    for loop in loops:
        try:
            loop.start()
            started.append(loop)
        except ModuleNotFoundError as error:
            print(f"{loop.name} is left out: {error}")
    named = {f"{each.images}, {each.name}, {each.kernels}": each for each in started}
    contenders = {name: partial(each.turn, 0.2 if small else 2.0) for name, each in named.items()}
    found = take_turns(contenders, 2 if small else 3)
    rows = list[Row]()
    for name, loop in named.items():
        speeds = [each["images_per_second"] for each in found[name]]
        profile = {"slowest_ms": loop.slowest()} if loop.images == SYNTHETIC else {}
        rows.append({
            "case": case, "images": loop.images, "loop": loop.name, "kernels": loop.kernels, **profile,
            "images_per_second": round(median(speeds), 1), **spread(speeds, 1),
            "peak_gib": round(loop.memory_bytes / 2**30, 2) if on_gpu() else None,
        })  # fmt: skip
    return rows


def goals(case: str, rows: list[Row]) -> list[Goal]:
    """Compare ours with the loop by hand, also with the same kernels, and the fastest rival; packed with generated."""
    speeds = {(row["images"], row["loop"], row["kernels"]): row["images_per_second"] for row in rows}
    files = (JPEG, OURS, REPEATABLE) in speeds
    compared = JPEG if files else SYNTHETIC
    default = speeds[compared, OURS, REPEATABLE]
    by_hand = speeds[compared, BY_HAND, FASTEST]
    rivals = [speed for (images, name, _), speed in speeds.items() if images == compared and name != OURS]
    equal = {"ours by the loop by hand": default / by_hand, "ours by the fastest rival": default / max(rivals)}
    enough = dict[str, tuple[float, float]]()
    if files:
        enough["packed by synthetic"] = (
            speeds[PACKED, OURS, REPEATABLE] / speeds[SYNTHETIC, OURS, REPEATABLE],
            _PACKED_SHARE,
        )
    else:
        same = speeds[SYNTHETIC, OURS, FASTEST]
        equal["ours by the loop by hand, fastest kernels"] = same / by_hand
        equal["ours by the loop by hand, repeatable kernels"] = default / speeds[SYNTHETIC, BY_HAND, REPEATABLE]
        enough["ours, repeatable by fastest kernels"] = default / same, _REPEATABLE_SHARE
    found = [
        goal(f"{case}, {compared}: {what}", round(ratio, 3), ">= 1 within noise", met=ratio >= 1 - _NOISE)
        for what, ratio in equal.items()
    ]
    for what, (share, least) in enough.items():
        found.append(goal(f"{case}: {what}", round(share, 3), f">= {least}", met=share >= least))
    return found


def measure(case: str, *, small: bool) -> Found:
    """Measure one of the cases."""
    configure(TrainConfig(synthetic=True))
    group = connect(rank_info_from(os.environ))
    with tempfile.TemporaryDirectory() as directory:
        rows = train(case, loops_of(case, group, Path(directory), small=small), small=small)
    disconnect()
    return rows, goals(case, rows)
