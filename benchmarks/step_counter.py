"""What it costs a script that its optimizer steps are counted (jobs.ranks.script.step_counter).

    .venv/bin/python -m benchmarks.step_counter

The steps of an optimizer that has almost nothing to do, SGD of four numbers, with and without the counter in turns.
"""

import tempfile
import time
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from statistics import median

import torch

from benchmarks.harness import Findings, Flags, Sample, benchmark, spread, take_turns
from jobs.ranks.script.step_counter import StepCounter


@dataclass(frozen=True, kw_only=True)
class Options(Flags):
    """How much to measure."""

    turns: int = 200
    """Turns of each kind."""
    steps: int = 2000
    """Steps in a turn."""


def microseconds(steps: int, counter: StepCounter | None) -> list[Sample]:
    """Return the time of a step, by the processor's time, because other processes may run."""
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.ones(4)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    handle = counter.attach(import_module("torch.optim.optimizer")) if counter else None
    began = time.thread_time()
    for _ in range(steps):
        optimizer.step()
    seconds = time.thread_time() - began
    if handle:
        handle.remove()
    return [{"step": 1e6 * seconds / steps}]


def measure(options: Options) -> Findings:
    """Let steps with and without the counter take turns."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        counter = StepCounter(f"{directory}/local-0", 0)
        contenders = {name: partial(microseconds, options.steps, each) for name, each in
                      {"plain": None, "counted": counter}.items()}  # fmt: skip
        found = take_turns(contenders, options.turns, warm_up=True)
    plain, counted = ([sample["step"] for sample in found[name]] for name in ("plain", "counted"))
    rows = [
        {"steps": name, "median_us": round(median(values), 2), **spread(values, unit="_us")}
        for name, values in (("plain", plain), ("counted", counted))
    ]
    costs = [more - less for more, less in zip(counted, plain, strict=True)]
    rows.append(
        {"steps": "counted - plain, in pairs", "median_us": round(median(costs), 2), **spread(costs, unit="_us")}
    )
    return Findings(tables={"rows": rows})


if __name__ == "__main__":
    benchmark("step_counter", Options, measure, small={"turns": 2}, packages=("torch",))
