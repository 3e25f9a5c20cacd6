"""The seconds between a worker's SIGKILL and the next step, with and without warm processes.

    .venv/bin/python -m benchmarks.restart

Starts a torchrun for each of one or two simulated nodes, one rank each, and kills a rank again and again. Kinds, which
take turns:

- forked: as Torchrelay runs its trainer: ranks are forks of a torchrun that has imported torch, the nodes' torchruns
  meet by our rendezvous, the state comes from a snapshot;
- started: the same, but each rank is a new process that imports torch;
- plain: torch's torchrun with its c10d rendezvous and a script that is written by hand, which is what submitit's and
  torchx's users have; it restores a checkpoint. The ranks of all restarts share a store in the first torchrun, where
  they may find the addresses of dead ranks;
- plain-new-store: the same with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which hardly anybody knows.

Without the node agents and Slurm, which a restart in place does not wait for. The total ends when the last rank has
made a step; the import is a part of it. `hung` counts the restarts after which no step came in a minute.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal, get_args

from benchmarks.fashion_mnist import unpack
from benchmarks.harness import (
    ROOT,
    Findings,
    Flags,
    Row,
    Sample,
    benchmark,
    medians,
    say,
    spread,
    take_turns,
)
from benchmarks.processes import descendants
from benchmarks.recovery.rivals import step_log
from hpc.base.environment import PRELOAD
from hpc.base.transport import pick_port
from hpc.run.nodedir import NodeDir
from jobs.ranks.rank_environment import torchrun_environment
from jobs.ranks.torchrun import PROCESS_WRAPPER, Rendezvous, torchrun_argv
from training.config.classifier_flags import ClassifierFlags
from training.config.command_line import train_words
from training.config.dataset_layout import FASHION_MNIST_DIRECTORY
from training.config.train_config import TrainConfig

BY_HAND = ROOT / "benchmarks" / "recovery" / "rivals" / "torchrun_ddp.py"
LOG = "steps.jsonl"
Kind = Literal["forked", "started", "plain", "plain-new-store"]
MODELS = {"small-cnn": (28, 512), "resnet18": (32, 128)}
"""Image size and global batch."""
_START_SECONDS, _RESTART_SECONDS = 120.0, 60.0
# Torchrelay waits this long before ranks that have just started are started again.
_SECONDS_BETWEEN_KILLS = 4.0


@dataclass(frozen=True, kw_only=True)
class Options(Flags):
    """How much to measure."""

    models: tuple[str, ...] = tuple(MODELS)
    """Models to train: small-cnn, resnet18 (32 px)."""
    ranks: tuple[int, ...] = (1, 2)
    """Numbers of ranks, each on a simulated node."""
    kills: int = 3
    """Kills of each kind."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is started and killed."""

    kind: Kind
    model: str
    ranks: int

    @property
    def config(self) -> TrainConfig:
        """The flags of the training."""
        size, batch = MODELS[self.model]
        return TrainConfig(
            data=str(FASHION_MNIST_DIRECTORY), model=self.model, batch_size=batch, epochs=10_000, lr=0.05,
            image_size=None if self.model == "small-cnn" else size,
        )  # fmt: skip

    def command(self, node: int, meeting: Rendezvous, directory: Path) -> tuple[list[str], dict[str, str]]:
        """Return the command line and the environment of a node's torchrun."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        if self.kind == "plain-new-store":
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if self.kind.startswith("plain"):
            return [
                sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.ranks}", "--nproc-per-node=1",
                "--max-restarts=1000", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{meeting.port}",
                "--rdzv-id=r", f"--rdzv-conf=is_host={int(node == 0)}", "--local-addr=127.0.0.1", str(BY_HAND),
                f"--data={directory / 'raw'}", f"--output={directory}", f"--model={self.model}", "--images=60000",
                f"--batch-size={MODELS[self.model][1]}", "--save-every=10",
            ], environment  # fmt: skip
        memory = node_directory(directory, node).path
        flags = [f"--run-dir={directory}", "--attempt=1", f"--node-dir={memory}", "--resolved"]
        rank = ["-m", "benchmarks.restart.marked_rank", str(directory / LOG), *flags, *train_words(self.config)]
        wrapped = [str(PROCESS_WRAPPER), "rank", str(directory / "logs"), str(memory)]
        program = [sys.executable, "-S", *wrapped, sys.executable, *rank]
        if self.kind == "forked":
            environment[PRELOAD] = ",".join(ClassifierFlags(train=self.config).as_program().preload)
            program = [*wrapped, *rank]
        argv = torchrun_argv(replace(meeting, node=node), 1, "127.0.0.1", sys.executable, program)
        argv = [sys.executable, "-S", str(PROCESS_WRAPPER), "torchrun", *argv]
        return argv, torchrun_environment(meeting, environment)


def node_directory(directory: Path, node: int) -> NodeDir:
    """Return a node's directory, as its agent would make it."""
    return NodeDir(directory / "memory" / f"node-{node}")


@contextmanager
def prepared(case: Case) -> Iterator[Path]:
    """Make a run directory with what a case reads, in memory, as snapshots are."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="torchrelay-restart-") as made:
        directory = Path(made)
        for node in range(case.ranks):
            for each in node_directory(directory, node).directories:
                each.mkdir(parents=True, exist_ok=True)
        (directory / "logs").mkdir()
        unpack(directory / "raw")
        yield directory


@contextmanager
def torchrun(case: Case, node: int, meeting: Rendezvous, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the torchrun of a node: ours as an agent starts it, with SIGTERM ignored, and torch's as a shell does."""
    argv, environment = case.command(node, meeting, directory)
    # torchrun reports every restart.
    with (directory / "logs" / f"torchrun-{node}.log").open("w") as log:
        process = subprocess.Popen(argv, env=environment, cwd=directory, stdout=log, stderr=log)
    try:
        yield process
    finally:
        # While it is stopped it starts no new ranks.
        process.send_signal(signal.SIGSTOP)
        for pid in descendants(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def wait_for_steps(
    directory: Path, case: Case, after: float, nodes: Sequence[subprocess.Popen[bytes]]
) -> list[step_log.Entry]:
    """Return the log since a time, once every rank has made a step. Raises TimeoutError if that does not come."""
    seconds = _RESTART_SECONDS if after else _START_SECONDS
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = [entry for entry in step_log.read(directory / LOG) if entry["time"] > after]
        if len({entry["rank"] for entry in found if entry["event"] == "first_step"}) == case.ranks:
            return found
        if any(node.poll() is not None for node in nodes):
            logs = "\n".join(path.read_text()[-2000:] for path in (directory / "logs").iterdir())
            raise SystemExit(f"a torchrun of {case} has ended: {logs}")
        time.sleep(0.02)
    raise TimeoutError(f"{case} made no step within {seconds:.0f} s")


def parts_of(found: Sequence[step_log.Entry], killed_at: float) -> Sample:
    """Return the seconds until all ranks had made a step, and those in which they imported what they need."""
    starts = [entry for entry in found if entry["event"] == "start"]
    stepped = max(entry["time"] for entry in found if entry["event"] == "first_step")
    import_seconds = max(entry["imported"] for entry in starts) - max(entry["began"] for entry in starts)
    return {"import": import_seconds, "total": stepped - killed_at}


def restart(case: Case, kills: int) -> list[Sample]:
    """Return the seconds of each restart: none of one after which no step came, and nothing is killed after it."""
    results = list[Sample]()
    with prepared(case) as directory, ExitStack() as stack:
        meeting = Rendezvous(
            run="r", attempt=1, secret=secrets.token_hex(16), round=1, num_nodes=case.ranks, host="127.0.0.1",
            port=pick_port(), node=0,
        )  # fmt: skip
        nodes = [stack.enter_context(torchrun(case, node, meeting, directory)) for node in range(case.ranks)]
        killed_at = 0.0
        for number in range(kills + 1):
            try:
                found = wait_for_steps(directory, case, killed_at, nodes)
            except TimeoutError as error:
                say(f"after {number} kills {error}")
                return [*results, {}]
            if number:
                results.append(parts_of(found, killed_at))
            time.sleep(_SECONDS_BETWEEN_KILLS)
            pid = step_log.ranks(found)[number % case.ranks]["pid"]
            killed_at = time.time()
            os.kill(pid, signal.SIGKILL)
    return results


def row(case: Case, samples: Sequence[Sample]) -> Row:
    """Return the medians of a case, and all its restarts."""
    found = [each for each in samples if each]
    named = {"model": case.model, "ranks": case.ranks, "kind": case.kind}
    hung = len(samples) - len(found)
    if not found:
        return {**named, "hung": hung}
    totals = spread([each["total"] for each in found], unit=", s")
    return {**named, **medians(found, unit=", s"), **totals, "restarts": len(found), "hung": hung, "all": found}


def measure(options: Options) -> Findings:
    """Kill ranks of each kind, with each model and number of ranks."""
    rows = list[Row]()
    for model, ranks in product(options.models, options.ranks):
        cases = {kind: Case(kind=kind, model=model, ranks=ranks) for kind in get_args(Kind)}
        found = take_turns({kind: partial(restart, case, options.kills) for kind, case in cases.items()}, 1)
        rows += [row(case, found[kind]) for kind, case in cases.items()]
        say(f"{model} on {ranks} ranks is done")
    return Findings(tables={"rows": rows})


if __name__ == "__main__":
    benchmark("restart", Options, measure, small={"models": ("small-cnn",), "ranks": (2,), "kills": 1})
