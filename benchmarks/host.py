"""What a step asks of the host: this trainer beside the hand-written loop, with a model that computes next to nothing.

    .venv/bin/python -m benchmarks.host

Where a GPU computes fast, the host decides the speed: each operation that torch dispatches costs it some microseconds.
Images have 8 or 32 pixels and a batch has 2 of them, so the host's work is a large part of a step on a CPU. Counted are
the operations of a step; measured is the CPU time of the thread that trains, in turns.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import Findings, Flags, Row, Sample, benchmark, medians, take_turns
from benchmarks.speed.loops import Case, hand_written
from benchmarks.speed.our_loop import ours
from training.runtime.process_group import connect, disconnect
from training.runtime.run_context import rank_info_from

_WARM_UP_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Options(Flags):
    """How much to measure."""

    turns: int = 15
    """Turns of each loop."""
    steps: int = 40
    """Steps of each turn."""
    models: tuple[str, ...] = ("small-cnn", "resnet18", "resnet50")
    """Models to train."""


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's metaclass
    """Counts the operations that torch dispatches, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation, and call it."""
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def make_steps(loop: Iterator[None], count: int) -> None:
    """Make some steps."""
    for _ in range(count):
        next(loop)


def operations(loop: Iterator[None], steps: int) -> Counter[str]:
    """Return the operations of some steps."""
    with Operations() as counter:
        make_steps(loop, steps)
    counts: Counter[str] = counter.counts
    return counts


def timed(loop: Iterator[None], steps: int) -> list[Sample]:
    """Return the CPU time of this thread for a step."""
    began = time.thread_time()
    make_steps(loop, steps)
    return [{"ms": 1000 * (time.thread_time() - began) / steps}]


def compare(options: Options, model: str, loops: dict[str, Iterator[None]]) -> list[Row]:
    """Return a row for each loop."""
    for loop in loops.values():
        make_steps(loop, _WARM_UP_STEPS)
    counts = {name: operations(loop, options.steps) for name, loop in loops.items()}
    samples = take_turns({name: partial(timed, loop, options.steps) for name, loop in loops.items()}, options.turns)
    [by_hand, *_] = samples.values()
    rows = list[Row]()
    for name, own in samples.items():
        ratios = [{"ratio": sample["ms"] / other["ms"]} for sample, other in zip(own, by_hand, strict=True)]
        more = counts[name] - next(iter(counts.values()))
        rows.append({
            "model": model, "loop": name, "operations": round(counts[name].total() / options.steps, 1),
            **medians(own, 3), **medians(ratios, 3),
            "more": {each: round(count / options.steps, 2) for each, count in more.most_common()},
        })  # fmt: skip
    return rows


def measure(options: Options) -> Findings:
    """Compare the loops with each model."""
    torch.set_num_threads(1)
    rows = list[Row]()
    group = connect(rank_info_from({}))
    with tempfile.TemporaryDirectory(prefix="torchrelay-host-") as directory:
        for model in options.models:
            case = Case(model=model, image_size=32 if model != "small-cnn" else 8, batch_size=2, amp="none", classes=10)
            loops = {
                "hand-written": hand_written(case, group.device), "ours": ours(case, group, Path(directory) / model)
            }  # fmt: skip
            rows += compare(options, model, loops)
    disconnect()
    return Findings(tables={"rows": rows})


if __name__ == "__main__":
    benchmark("host", Options, measure, small={"turns": 2, "steps": 5, "models": ("small-cnn",)}, packages=("torch",))
