"""`python -m training.verify_resume`: proof that an interrupted training ends as an uninterrupted one does.

Trains twice on this machine: once without interruption, once cut at random steps by SIGKILL or SIGTERM and resumed
each time, then compares everything that the two have written. Runs where a training runs; starts the ranks itself.
"""

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from hpc.core import ledger, program
from hpc.core.errors import TorchrelayError, UserError
from hpc.core.files import read_json_lines, write_json
from hpc.core.rundir import RunDir
from training.config.command_line import RecipeName, parse_flags
from training.config.dataset_layout import check_data, resolve_data
from training.config.rank_options import spec_argv
from training.config.train_config import TrainConfig, check_world
from training.runtime.counter_rng import Purpose, derive_key, rand_int
from training.runtime.fault_injection import NO_FAULT, POINTS, Fault
from training.verify_resume.compare_states import ComparedPart, compare_runs
from training.verify_resume.local_launch import prepare_server, start_ranks, wait_for

_DONE = {
    "step": "killed in the middle of step",
    "save": "killed in the middle of a save at or after step",
    "evaluate": "killed in the middle of an evaluation at or after step",
    "stop": "told to stop before step",
}
# Losses of the same steps by other numbers of ranks: what the order of float32 sums makes of them along a training.
_LOSS_TOLERANCE = 0.01
# For all ranks to say what is wrong, after one has failed.
_GRACE_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Train once without interruption, once cut at random steps and resumed, and compare the two bit by bit.

    Exit code 0: they are the same. 1: they differ. With several numbers of ranks, such as 4,3,2, each resumption has
    the next one: then the samples of all steps are compared, and the losses.
    """

    train: tyro.conf.OmitArgPrefixes[TrainConfig]
    recipe: RecipeName = None
    config: Path | None = None
    """YAML file of flags. It overrides --recipe; the command line overrides both."""
    cuts: int = 3
    """How often to interrupt the second training."""
    ranks: str = "2"
    """Ranks to train with, or several numbers for the attempts in turn: 4,3,2."""
    keep: Path | None = None
    """A new directory for both trainings' files; without it they are deleted, unless the trainings differ."""


def main() -> int:
    """From the command line to the exit code: 1 if anything differs."""
    # Ended by Slurm or anybody, the ranks must not train on alone.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    return program.run(_work)


def _work() -> int:
    arguments = parse_flags(VerifyOptions, sys.argv[1:], "python -m training.verify_resume")
    sizes = check_arguments(arguments)
    directory = _new_directory(arguments.keep)
    same = verify(arguments.train, sizes, arguments.cuts, directory)
    if same and arguments.keep is None:
        shutil.rmtree(directory)
    else:
        print(f"files: {directory}")
    return 0 if same else 1


def check_arguments(arguments: VerifyOptions) -> list[int]:
    """The numbers of ranks.

    Raises:
        UserError: a flag cannot work.
    """
    try:
        sizes = [int(part) for part in arguments.ranks.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UserError(f"--ranks is {arguments.ranks!r}: use a number such as 2, or several such as 4,3,2")
    if arguments.cuts < 1:
        raise UserError(f"--cuts is {arguments.cuts}: use 1 or more")
    check_world(arguments.train, max(sizes))
    if not arguments.train.synthetic:
        check_data(resolve_data(arguments.train.data))
    return sizes


def _new_directory(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="verify-resume-"))
    try:
        keep.mkdir(parents=True)
    except FileExistsError as error:
        raise UserError(f"--keep is {keep}, which exists: give a new directory") from error
    except OSError as error:
        raise UserError(f"--keep is {keep}, which cannot be made ({error.strerror}): give another directory") from error
    return keep.absolute()


def verify(config: TrainConfig, sizes: list[int], cuts: int, directory: Path) -> bool:
    """Train twice and compare.

    Raises:
        TorchrelayError: a training failed.
    """
    prepare_server()
    same_size = len(set(sizes)) == 1
    config = replace(config, log_samples=config.log_samples or not same_size)
    whole, cut = (RunDir(directory / name) for name in ("uninterrupted", "interrupted"))
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"training without interruption on {sizes[0]} ranks")
    run_attempt(config, whole, 1, sizes[0], NO_FAULT)
    steps = _total_steps(whole)
    validated = any(record["split"] == "val" for record in read_json_lines(whole.eval_metrics))
    # Without validation the only evaluation is the last thing that a training does.
    points = [point for point in POINTS if validated or point != "evaluate"]
    for attempt, fault in enumerate(draw_faults(config, sizes, cuts, steps, points), start=1):
        size = sizes[(attempt - 1) % len(sizes)]
        began = time.monotonic()
        if run_attempt(config, cut, attempt, size, fault):
            break
        told = f"rank {fault.rank} of {size} {_DONE[fault.point]} {fault.step} of {steps}"
        console.print(f"cut {attempt} of {cuts}: {told}, after {time.monotonic() - began:.0f} s")
    if not cut.final_result.exists():
        run_attempt(config, cut, cuts + 1, sizes[cuts % len(sizes)], NO_FAULT)
    done = sum(event["event"] == "train_started" for event in ledger.read(cut.events)) - 1
    parts = compare_runs(whole, cut) if same_size else compare_courses(whole, cut)
    if done < cuts:
        missing = f"only {done} could be made: use more --epochs or fewer --cuts"
        parts.append(ComparedPart(name="cuts", compared=f"{cuts}", difference=missing))
    return report(parts, console, f"{done} of {cuts} cuts", steps, "bit-identical" if same_size else "the same samples")


def _total_steps(run: RunDir) -> int:
    return next(int(event["total_steps"]) for event in ledger.read(run.events) if event["event"] == "train_started")


def draw_faults(
    config: TrainConfig, sizes: list[int], cuts: int, steps: int, at_points: Sequence[str] = POINTS
) -> list[Fault]:
    """Where to cut: at random steps, at each kind of point in turn, on random ranks. A matter of the seed."""
    key = derive_key(config.seed, Purpose.CUT)
    # After the last step but one a stop comes too late.
    at = (rand_int(key, torch.arange(cuts), max(1, steps - 2)) + 1).tolist()
    ranks = rand_int(key, torch.arange(cuts) + cuts, 2**20).tolist()
    points = [at_points[number % len(at_points)] for number in range(cuts)]
    per_epoch = steps // config.epochs
    # An evaluation comes when its epoch is over.
    late = [
        -(-step // per_epoch) * per_epoch if point == "evaluate" else step
        for step, point in zip(at, points, strict=True)
    ]
    order = sorted(range(cuts), key=lambda number: (late[number], points[number] == "evaluate"))
    return [
        # Rank 0 is the one that saves.
        Fault(point=points[n], step=at[n], rank=0 if points[n] == "save" else ranks[n] % sizes[place % len(sizes)])
        for place, n in enumerate(order)
    ]


def run_attempt(config: TrainConfig, run: RunDir, attempt: int, size: int, fault: Fault) -> bool:
    """Train until the end or the fault, and return whether it was the end.

    Raises:
        TorchrelayError: it ended in another way.
    """
    run.attempt_logs(attempt).mkdir(parents=True)
    log = run.attempt_logs(attempt) / "ranks.log"
    # Snapshots survive the cuts, as they do in a node's memory.
    node = run.path.with_name(f"{run.name}-node")
    node.mkdir(mode=0o700, exist_ok=True)
    spec = run.path.with_name(f"{run.name}.json")
    write_json(spec, {"train": asdict(config)})
    argv = spec_argv(spec, run.path, attempt, node, fault="" if fault == NO_FAULT else str(fault))
    codes = wait_for(start_ranks([argv] * size, log), _GRACE_SECONDS)
    if -signal.SIGKILL in codes:
        return False
    if any(codes):
        raise TorchrelayError(f"the training failed with exit codes {codes}: {_last_words(log)} (all of it: {log})")
    return run.final_result.exists()


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
    return next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])


def compare_courses(one: RunDir, other: RunDir) -> list[ComparedPart]:
    """Compare the samples of all steps, and the losses, of trainings with different numbers of ranks."""
    samples = [samples_by_step(run) for run in (one, other)]
    wrong = next((step for step in samples[0] if samples[0][step] != samples[1].get(step)), None)
    difference = "" if wrong is None else f"step {wrong} has other samples"
    return [
        ComparedPart(name="samples", compared=f"{len(samples[0])} steps", difference=difference),
        _compare_losses(*(list(read_json_lines(run.train_metrics)) for run in (one, other))),
    ]


def _compare_losses(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> ComparedPart:
    if len(one) != len(other):
        return ComparedPart(
            name="losses", compared=f"{len(one)} losses", difference=f"{len(one)} and {len(other)} losses"
        )
    off = {a["step"]: abs(a["loss"] - b["loss"]) / abs(a["loss"] or 1) for a, b in zip(one, other, strict=True)}
    far = next((step for step, relative in off.items() if relative > _LOSS_TOLERANCE), None)
    difference = f"by more than {_LOSS_TOLERANCE:.0%} from step {far} on: rounding grows, a smaller --lr calms it"
    compared = f"{len(off)} losses, within {max(off.values()):.2g} of each other"
    return ComparedPart(name="losses", compared=compared, difference="" if far is None else difference)


def samples_by_step(run: RunDir) -> dict[int, list[int]]:
    """The images of each step in the order of the ranks, as the last attempt at that step used them."""
    latest: dict[int, tuple[str, list[int]]] = {}
    for path in sorted(run.sample_log(0, 0).parent.glob("*.jsonl")):
        attempt = path.name.partition("-rank-")[0]
        for line in read_json_lines(path):
            before = latest.get(line["step"], ("", []))
            indices = before[1] if before[0] == attempt else []
            latest[line["step"]] = (attempt, indices + line["indices"])
    return {step: indices for step, (_, indices) in sorted(latest.items())}


def report(parts: list[ComparedPart], console: Console, cuts: str, steps: int, verdict: str) -> bool:
    """Print what was compared and the verdict, and return whether all is equal."""
    table = Table("", "compared", "result")
    for part in parts:
        table.add_row(part.name, part.compared, part.difference or "equal")
    console.print(table)
    wrong = next((part for part in parts if part.difference), None)
    if wrong:
        console.print(f"not proven after {cuts}: {wrong.name}: {wrong.difference}")
    else:
        console.print(f"{verdict} at step {steps}, after {cuts}")
    return wrong is None


if __name__ == "__main__":
    sys.exit(main())
