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
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.nn import functional

from hpc.base.errors import BadNodeError, TorchrelayError
from hpc.base.files import append_json_line
from hpc.run.rundir import RunDir
from training.runtime.busy_gpu import wait_while_busy
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

    Raises:
        BadNodeError: this rank's device or network returned wrong results.
        TorchrelayError: the device of another rank returned wrong results.
    """
    began = time.monotonic()
    falsify = fault.inject("preflight", 0, group.rank)
    problem = ""
    computed = wait_while_busy(lambda: list(_computations(group.device, falsify=falsify)))
    for what, wrong, total in computed:
        if wrong and not problem:
            problem = f"{_describe_device(group)} computes wrongly: {wrong} of {total} elements of {what} are wrong"
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


def _computations(device: torch.device, *, falsify: bool) -> Iterator[tuple[str, int, int]]:
    """Run operations that models use. Yields each one's name, number of wrong elements, and number of elements."""
    for side, dtype, periods in _products(device):
        yield "a matrix product", count_wrong(device, side, dtype, periods, falsify=falsify), side**2
    if device.type == "cpu":
        # Check no convolutions on a CPU, where the first one takes half a second.
        return
    dtype = _products(device)[-1][1]
    yield "a convolution and its gradients", *wrong_in_convolution(device, dtype)
    yield "attention and its gradient", *wrong_in_attention(device, dtype)


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


def wrong_in_convolution(device: torch.device, dtype: torch.dtype, *, falsify: bool = False) -> tuple[int, int]:
    """Return how many elements of a convolution and its gradients (input, weights) are wrong, and how many there are.

    All inputs are -1, 0 or 1, and no sum has more than 256 terms: so each partial sum is a whole number that bfloat16
    holds, and the result is exact in any order. A stride of 2 rules out Winograd's algorithm, which is not exact.
    """
    numbers = torch.arange(4 * 16 * 16 * 16)
    images = (numbers * 7 % 17 % 3 - 1).view(4, 16, 16, 16).float()
    weights = (numbers[: 16 * 16 * 9] * 11 % 19 % 3 - 1).view(16, 16, 3, 3).float()
    gradient = (numbers[: 4 * 16 * 8 * 8] * 5 % 13 % 3 - 1).view(4, 16, 8, 8).float()
    found = _convolve(*(value.to(device, dtype) for value in (images, weights, gradient)))
    found[0][0, 0, 0, 0] += falsify
    expected = _convolve(images, weights, gradient)
    return _count_different(found, [value.to(device, dtype) for value in expected])


def _convolve(images: Tensor, weights: Tensor, gradient: Tensor) -> list[Tensor]:
    images, weights = images.requires_grad_(), weights.requires_grad_()
    result = functional.conv2d(images, weights, stride=2, padding=1)
    return [result.detach().clone(), *torch.autograd.grad(result, (images, weights), gradient)]


def wrong_in_attention(device: torch.device, dtype: torch.dtype, *, falsify: bool = False) -> tuple[int, int]:
    """Return the numbers of wrong and of all elements of an attention and of the gradient of its values.

    All keys are the same, so each query gets the mean of the values, a multiple of 1/64 that is exact in any order.
    """
    count = 64
    keys = torch.ones(2, 2, count, count, device=device, dtype=dtype)
    places = torch.arange(count, device=device)
    # Column d has d ones.
    values = (places[:, None] < places).to(dtype).expand(2, 2, -1, -1).clone().requires_grad_()
    result = functional.scaled_dot_product_attention(keys, keys, values)
    with warnings.catch_warnings():
        # training.runtime.determinism makes torch warn that this kernel sums in any order, but these sums are exact.
        warnings.filterwarnings("ignore", ".*non-deterministic algorithm")
        [gradient] = torch.autograd.grad(result, values, torch.ones_like(result))
    found = [result.detach().clone(), gradient]
    # The kernels for older GPUs return a transposed result, which has no flat view.
    found[0][0, 0, 0, 0] += falsify
    means = (places / count).to(dtype).expand_as(result)
    return _count_different(found, [means, torch.ones_like(values)])


def _count_different(found: list[Tensor], expected: list[Tensor]) -> tuple[int, int]:
    different = sum(int((one != other).sum()) for one, other in zip(found, expected, strict=True))
    return different, sum(value.numel() for value in expected)


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
