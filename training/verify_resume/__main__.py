"""`python -m training.verify_resume`: proves that an interrupted training ends like an uninterrupted one.

It starts the ranks itself, and trains twice on this machine: once without interruption, once cut at random steps by
SIGKILL or SIGTERM and resumed each time. Then it compares the states, models, results and metrics of both trainings.
"""

import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torchrelay.checkpoint_files import STATE_VALUES, list_checkpoints

from hpc.base import program
from hpc.base.errors import TorchrelayError, UserError
from hpc.base.files import read_json_lines
from hpc.run.events.history import History
from hpc.run.events.kinds import TrainStarted
from hpc.run.rundir import RunDir
from training.config.command_line import TrainFlags, parse_flags, train_words
from training.config.dataset_layout import check_data, resolve_data
from training.config.train_config import TrainConfig, check_world
from training.runtime.counter_rng import Purpose, derive_key, rand_int
from training.runtime.fault_injection import NO_FAULT, Fault
from training.verify_resume.compare import ComparedPart, compare_runs
from training.verify_resume.local_launch import prepare_server, start_ranks, wait_for_ranks

# Faults after which a training can resume.
CUTS = {
    "step": "SIGKILL during step",
    "save": "SIGKILL during the first save from step",
    "evaluate": "SIGKILL during the first evaluation from step",
    "stop": "SIGTERM before step",
}
# After a rank has failed, the other ranks have this time to print their errors.
_GRACE_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(TrainFlags):
    """Train once without interruption, once interrupted at random steps and resumed, and compare the two bit by bit.

    Exit codes: 0 the trainings are equal, 1 they differ or one failed, 2 your mistake.
    """

    cuts: int = 3
    """Interruptions of the second training."""
    ranks: int = 2
    """Number of ranks."""


def main() -> int:
    """Run the program, and return its exit code."""
    # Exit at SIGTERM, so that the ranks are ended, too.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    options = parse_flags(VerifyOptions, sys.argv[1:], program.called("training.verify_resume"))
    for name, value in (("ranks", options.ranks), ("cuts", options.cuts)):
        if value < 1:
            raise UserError(f"--{name} is {value}: use 1 or more")
    check_world(options.train, options.ranks)
    if not options.train.synthetic:
        check_data(resolve_data(options.train.data))
    directory = Path(tempfile.mkdtemp(prefix="verify-resume-"))
    same = verify(options.train, options.ranks, options.cuts, directory)
    if same:
        shutil.rmtree(directory)
    else:
        print(f"files of both trainings: {directory}")
    return 0 if same else 1


def verify(config: TrainConfig, ranks: int, cuts: int, directory: Path) -> bool:
    """Train twice, and return whether the trainings are equal. Raises TorchrelayError if one failed."""
    prepare_server()
    whole, cut = (RunDir(directory / name) for name in ("uninterrupted", "interrupted"))
    console = Console(soft_wrap=True, highlight=False)
    number = f"{ranks} rank{'' if ranks == 1 else 's'}"
    console.print(f"training 1 of 2: uninterrupted, {number}")
    run_attempt(config, whole, 1, ranks, NO_FAULT)
    steps = History.load(whole).of(TrainStarted)[0].total_steps or 0
    console.print(f"training 2 of 2: {cuts} cuts in {steps} steps")
    # Without validation, the only evaluation is the test after the last step.
    validated = any(record["split"] == "val" for record in read_json_lines(whole.eval_metrics))
    points = [point for point in CUTS if validated or point != "evaluate"]
    for attempt, fault in enumerate(draw_faults(config, ranks, cuts, steps, points), start=1):
        began = time.monotonic()
        if run_attempt(config, cut, attempt, ranks, fault):
            break
        what = f"rank {fault.rank} of {ranks}, {CUTS[fault.point]} {fault.step}"
        console.print(f"cut {attempt} of {cuts}: {what}; attempt of {time.monotonic() - began:.0f} s")
    if not cut.final_result.exists():
        run_attempt(config, cut, cuts + 1, ranks, NO_FAULT)
    parts = compare_runs(whole, cut)
    done = len(History.load(cut).of(TrainStarted)) - 1
    if done < cuts:
        missing = f"only {done} were possible: use more --epochs or fewer --cuts"
        parts.append(ComparedPart(name="cuts", compared=f"{cuts} cuts", difference=missing))
    numerics = json.loads((list_checkpoints(cut.checkpoints)[0] / STATE_VALUES).read_bytes())["objects"]["numerics"]
    where = f"{number} on {numerics['device']}, torch {numerics['torch']}, on one node"
    holds_for = f"--deterministic {config.deterministic}, {where}"
    return report(parts, console, f"bit-identical at step {steps}, after {done} of {cuts} cuts: {holds_for}")


def draw_faults(config: TrainConfig, ranks: int, cuts: int, steps: int, points: Sequence[str]) -> list[Fault]:
    """Return the cuts in the order in which they happen: random steps and ranks from the seed, and kinds in turn."""
    key = derive_key(config.seed, Purpose.CUT)
    # A stop before the last step has no effect, since the training ends.
    at = (rand_int(key, torch.arange(cuts), max(1, steps - 2)) + 1).tolist()
    of_rank = rand_int(key, torch.arange(cuts) + cuts, ranks).tolist()
    kinds = [points[number % len(points)] for number in range(cuts)]
    steps_per_epoch = steps // config.epochs
    # The step of each cut; an evaluation is at the end of its epoch.
    happens = [
        -(-step // steps_per_epoch) * steps_per_epoch if kind == "evaluate" else step
        for step, kind in zip(at, kinds, strict=True)
    ]
    order = sorted(range(cuts), key=lambda number: (happens[number], kinds[number] == "evaluate"))
    return [
        # Only rank 0 saves.
        Fault(point=kinds[n], step=at[n], rank=0 if kinds[n] == "save" else of_rank[n])
        for n in order
    ]


def run_attempt(config: TrainConfig, run: RunDir, attempt: int, size: int, fault: Fault) -> bool:
    """Train until the end or the fault, and return whether the training has ended.

    Raises TorchrelayError if the training failed in another way.
    """
    run.attempt_logs(attempt).mkdir(parents=True)
    log = run.attempt_logs(attempt) / "ranks.log"
    # Snapshots outlive the attempts, as in a node's memory.
    node = run.path.with_name(f"{run.name}-node")
    node.mkdir(mode=0o700, exist_ok=True)
    argv = [
        f"--run-dir={run.path}", f"--attempt={attempt}", f"--node-dir={node}", "--resolved", *train_words(config),
        *([] if fault == NO_FAULT else [f"--fault={fault}"]),
    ]  # fmt: skip
    codes = wait_for_ranks(start_ranks([argv] * size, log), _GRACE_SECONDS)
    if -signal.SIGKILL in codes:
        return False
    if any(codes):
        lines = log.read_text(errors="replace").strip().splitlines() or ["the log is empty"]
        error = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])
        raise TorchrelayError(f"the training failed with exit codes {codes}: {error} (log: {log})")
    return run.final_result.exists()


def report(parts: list[ComparedPart], console: Console, verdict: str) -> bool:
    """Print the compared parts and the result, and return whether all parts are equal."""
    table = Table("part", "compared", "result")
    for part in parts:
        result = "differs" if part.difference else "" if part.compared == "none" else "equal"
        table.add_row(part.name, part.compared, result)
    console.print(table)
    wrong = [part for part in parts if part.difference]
    for part in wrong:
        console.print(f"{part.name}: {part.difference}")
    console.print(f"not proven: {verdict}" if wrong else verdict)
    return not wrong


if __name__ == "__main__":
    sys.exit(program.run(main))
