"""Checks that each device computes correctly and that all ranks communicate. Runs on every rank, before a training.

`python -m training.engine.preflight RUN_DIR ATTEMPT` under torchrun does the same before a user's own script. It runs
in the user's environment (--python), so all that it imports is the standard library, torch, and ours that do the same.
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

from hpc.core.errors import BadNodeError, TorchrelayError
from hpc.core.ledger import EventWriter, attempt_prefix
from hpc.core.rundir import RunDir
from training.runtime.fault_injection import NO_FAULT, Fault
from training.runtime.process_group import ProcessGroup, connect, disconnect
from training.runtime.rank_device import device_name, device_of_the_node
from training.runtime.run_context import rank_info_from
from training.runtime.software import versions

_HELP = """usage: hpc preflight

Check that this machine's device computes correctly. All GPUs of a machine, and that they communicate:

  torchrun --nproc-per-node 4 -m training.engine.preflight"""
_REPEATS = 3
# Enough for the bandwidth to count more than the latency, and little enough for a fraction of a second.
_MEGABYTES = {"cpu": 2, "cuda": 64}


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """The result, the same on every rank but for the clock."""

    world_size: int
    device: str
    """The models of all ranks' GPUs, or `CPU`."""
    allreduce_gb_per_second: float | None
    """Bus bandwidth of the fastest all-reduce, as nccl-tests defines it: 2 (n - 1) / n x bytes / time, which each of n
    ranks sends, so that it does not depend on n. None: there is only one rank."""
    seconds: float


@device_of_the_node()
def run_preflight(group: ProcessGroup, fault: Fault = NO_FAULT) -> PreflightReport:
    """Let all devices compute and all ranks communicate.

    Raises:
        BadNodeError: this rank's device or network returned wrong results.
        TorchrelayError: another rank's did.
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
        raise TorchrelayError(f"this rank passed, but {next(iter(problems.values()))}")
    if group.device.type == "cuda":
        # It is not the training's.
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
    """The products that a device must compute: side and dtype of the matrices, and the periods of their numbers.

    All partial sums are whole numbers that the dtype holds, so a product is exact in any order of summation, also with
    TF32: over the product of the periods, which have no common factor, the terms add up to 0.
    """
    small = (256, torch.float32, (17, 13))
    if device.type == "cpu":
        return [small]
    # This one keeps the tensor cores of the whole GPU busy for milliseconds.
    half = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return [small, (8192, half, (5, 3))]


def count_wrong(
    device: torch.device, side: int, dtype: torch.dtype, periods: tuple[int, int], *, falsify: bool = False
) -> int:
    """How many elements of a product of two square matrices of small whole numbers a device gets wrong.

    The rows on the left and the columns on the right repeat, and with them the product: so the CPU computes a small
    part of it, however large the matrices are.
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


def main(run_dir: str = "", attempt: str = "1") -> int:
    """Check, print, and record the result in the run if there is one; turn errors into one line and an exit code."""
    if run_dir in {"-h", "--help"}:
        print(_HELP)
        return 0
    rank_info = rank_info_from(os.environ)
    try:
        group = connect(rank_info)
        report = run_preflight(group)
    except TorchrelayError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    if rank_info.is_rank_zero:
        speed = report.allreduce_gb_per_second
        bandwidth = f", all-reduce {speed} GB/s" if speed is not None else ""
        print(f"preflight: {group.description}{bandwidth}, {report.seconds} s", flush=True)
        if run_dir:
            _record(report, RunDir(Path(run_dir)), int(attempt))
    disconnect()
    return 0


def _record(report: PreflightReport, run: RunDir, attempt: int) -> None:
    ledger = EventWriter(run.events / f"{attempt_prefix(attempt)}trainer.jsonl")
    try:
        ledger.path.parent.mkdir(parents=True, exist_ok=True)
        ledger.append("preflight", attempt=attempt, **asdict(report))
        ledger.append("software", attempt=attempt, **versions())
    except OSError as error:
        print(f"warning: {ledger.path} cannot be written ({error}): this result is lost", flush=True)


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main(*sys.argv[1:]))
