"""Checks that each device computes correctly and that all ranks communicate. Runs on every rank, before a training.

`python -m training.engine.preflight RUN_DIR ATTEMPT` under torchrun makes this check before a user's script. Since it
runs in the user's environment (--python), it may import only the standard library, torch, and those of our modules
that import nothing else.
"""

import faulthandler
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, distributed

from hpc.base.errors import BadNodeError, TorchrelayError
from hpc.base.files import append_json_line
from hpc.run.rundir import RunDir
from training.runtime.fault_injection import NO_FAULT, Fault
from training.runtime.process_group import ProcessGroup, connect, disconnect
from training.runtime.rank_device import device_name, device_of_the_node
from training.runtime.run_context import rank_info_from
from training.runtime.software import versions

_REPEATS = 3
# At these sizes, bandwidth matters more than latency, and an all-reduce takes a fraction of a second.
_MEGABYTES = {"cpu": 2, "cuda": 64}


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """The result of a preflight. Ranks differ only in the bandwidth and the seconds that they measured."""

    world_size: int
    device: str
    """Models of all ranks' GPUs, or `CPU`."""
    allreduce_gb_per_second: float | None
    """Bus bandwidth of the fastest all-reduce of n ranks, as nccl-tests defines it: 2 (n - 1) / n x bytes / time, which
    does not depend on n. None if there is only one rank."""
    seconds: float


@device_of_the_node()
def run_preflight(group: ProcessGroup, fault: Fault = NO_FAULT) -> PreflightReport:
    """Check that all devices compute correctly and that all ranks communicate. All ranks must call this.

    Raises BadNodeError if this rank's device or network returned wrong results, or TorchrelayError if the device of
    another rank returned wrong results.
    """
    began = time.monotonic()
    falsify = fault.inject("preflight", 0, group.rank)
    problem = ""
    for side, dtype, periods in _products(group.device):
        wrong = count_wrong(group.device, side, dtype, periods, falsify=falsify)
        if wrong and not problem:
            elements = f"{wrong} of {side**2} elements of a matrix product"
            problem = f"{_describe_device(group)} computes wrongly: {elements} are wrong"
    problems = {rank: text for rank, text in enumerate(group.all_gather_json(problem)) if text}
    if problem:
        raise BadNodeError(problem)
    if problems:
        raise TorchrelayError(f"this rank passed the check, but another rank failed: {next(iter(problems.values()))}")
    if group.device.type == "cuda":
        # Free the preflight's memory, which the training needs.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(group.device)
    bandwidth = None
    if group.world_size > 1:
        values = torch.empty(_MEGABYTES[group.device.type] * 2**20 // 4, device=group.device)
        fastest = min(_all_reduce_seconds(values, group) for _ in range(_REPEATS))
        bandwidth = round(2 * (group.world_size - 1) / group.world_size * values.nbytes / fastest / 1e9, 3)
    return PreflightReport(
        world_size=group.world_size,
        device=", ".join(sorted(set(group.all_gather_json(device_name(group.device))))),
        allreduce_gb_per_second=bandwidth,
        seconds=round(time.monotonic() - began, 3),
    )


def _products(device: torch.device) -> list[tuple[int, torch.dtype, tuple[int, int]]]:
    """Return the products that a device must compute: side and dtype of the matrices, and the periods of their numbers.

    All partial sums are whole numbers that the dtype holds, so a product is exact in any order of summation, also with
    TF32. The sums stay small: the periods m and n have no common factor, so any m * n terms in a row add up to 0.
    """
    small = (256, torch.float32, (17, 13))
    if device.type == "cpu":
        return [small]
    # The large product keeps the tensor cores of the whole GPU busy for milliseconds.
    half = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return [small, (8192, half, (5, 3))]


def count_wrong(
    device: torch.device, side: int, dtype: torch.dtype, periods: tuple[int, int], *, falsify: bool = False
) -> int:
    """Return how many elements a device gets wrong in a product of two square matrices of small whole numbers.

    The rows of the left matrix and the columns of the right one repeat, and so does their product. So the CPU has to
    compute only a small part of the product, however large the matrices are.
    """
    left_period, right_period = periods
    numbers = torch.arange(side)
    rows = (numbers[:left_period, None] * 7 + numbers * 3) % left_period - left_period // 2
    columns = (numbers[:, None] * 5 + numbers[:right_period] * 11) % right_period - right_period // 2
    which_row, which_column = (numbers % left_period).to(device), (numbers % right_period).to(device)
    expected = (rows.double() @ columns.double()).to(device, dtype)[which_row][:, which_column]
    found = rows.to(device, dtype)[which_row] @ columns.to(device, dtype)[:, which_column]
    found[0, 0] += falsify
    return int((found != expected).sum())


def _all_reduce_seconds(values: Tensor, group: ProcessGroup) -> float:
    values.fill_(group.rank + 1)
    group.wait_for_device()
    began = time.perf_counter()
    distributed.all_reduce(values)
    group.wait_for_device()
    seconds = time.perf_counter() - began
    expected = group.world_size * (group.world_size + 1) / 2
    if wrong := int((values != expected).sum()):
        raise BadNodeError(f"{_describe_device(group)} got {wrong} of {len(values)} elements of an all-reduce wrongly")
    return seconds


def _describe_device(group: ProcessGroup) -> str:
    device = device_name(group.device) + (f" {group.device.index}" if group.device.type == "cuda" else "")
    return f"rank {group.rank} on {platform.node()} ({device})"


def connect_and_check() -> tuple[ProcessGroup, PreflightReport]:
    """Connect the ranks and run the preflight. At an error, print it in one line and exit with its code."""
    try:
        group = connect(rank_info_from(os.environ))
        return group, run_preflight(group)
    except TorchrelayError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def main(run_dir: str = "", attempt: str = "1") -> int:
    """Run the preflight, print its result, and record it in the run if `run_dir` is given."""
    group, report = connect_and_check()
    if group.is_rank_zero:
        speed = report.allreduce_gb_per_second
        bandwidth = f", all-reduce {speed} GB/s" if speed is not None else ""
        print(f"preflight: {group.description}{bandwidth}, {report.seconds} s", flush=True)
        if run_dir:
            _record(report, RunDir(Path(run_dir)), int(attempt))
    disconnect()
    return 0


def _record(report: PreflightReport, run: RunDir, attempt: int) -> None:
    # Write plain dicts: the types in hpc.run.events need a package that a user's environment may lack.
    ledger, known = run.events / f"attempt-{attempt:03d}-trainer.jsonl", {"time": time.time(), "attempt": attempt}
    try:
        ledger.parent.mkdir(exist_ok=True)
        append_json_line(ledger, {"event": "preflight", **known, **asdict(report)})
        append_json_line(ledger, {"event": "software", **known, **versions()})
    except OSError as error:
        print(f"warning: {ledger} cannot be written ({error}): this result is lost", flush=True)


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main(*sys.argv[1:]))
