"""Where each second goes between a worker's SIGKILL and its next step, with and without warm processes.

    .venv/bin/python -m benchmarks.restart
    .venv/bin/python -m benchmarks.restart --kills 2 --models small-cnn --ranks 2

Starts a torchrun for each of one or two pretended nodes, one rank each, and kills a rank again and again. Kinds, which
take turns:

- forked: as Torchrelay runs its trainer: ranks are forks of a torchrun that has imported torch, the nodes' torchruns
  meet by our rendezvous, the state comes from a snapshot;
- started: the same, but each rank is a new process that imports torch, as before there were forks;
- plain: torch's torchrun with its c10d rendezvous and `plain_ddp.py`, which is what submitit's and torchx's users have;
  it restores a checkpoint.
- plain-new-store: the same with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which hardly anybody knows. By default the ranks
  of all restarts share a store in the first torchrun, where they may find the addresses of dead ranks.

Without the node agents and Slurm, which a restart in place does not wait for. Each part ends when the last process has
passed it, so that the parts add up to the total: until the last rank has made a step. Prints the medians as a table in
Markdown, and writes benchmarks/results/restart.json. Two ranks compete on two cores: what one takes is listed, too.

`hung`: restarts after which no step came in a minute.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import tyro

from benchmarks import record
from benchmarks.restart import marks
from hpc.core.kernel import children
from hpc.core.nodedir import NodeDir
from jobs.ranks.rendezvous import TORCHRUN, Rendezvous, pick_port, torchrun_argv, torchrun_environment
from jobs.ranks.torchrun import PROCESS_WRAPPER
from training.config.dataset_layout import FASHION_MNIST_DIRECTORY
from training.config.train_config import TrainConfig
from training.config.training_spec import Training, spec_argv, trainer_program

HERE = Path(__file__).parent
Kind = Literal["forked", "started", "plain", "plain-new-store"]
# A part ends where the last process has passed the mark. `noticed` is passed first by the torchrun of the killed rank.
PARTS = {
    "notice": ("noticed",), "end ranks": ("ranks ended",), "meet": ("met",), "fork": ("program",),
    "import": ("imported",), "process group": ("connected",), "checks": ("checked",),
    "data, model": ("data", "model"), "DDP, optimizer": ("trainer", "warm"), "restore": ("restored",),
    "first step": ("stepped",),
}  # fmt: skip
MODELS = {"small-cnn": (28, 512), "resnet18": (32, 128)}
"""Image size and global batch."""
_START_SECONDS, _RESTART_SECONDS = 120.0, 60.0
# Torchrelay waits this long before ranks that have just started are started again.
_SECONDS_BETWEEN_KILLS = 4.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    models: tuple[str, ...] = tuple(MODELS)
    """Of small-cnn and resnet18 (32 px)."""
    kinds: tuple[Kind, ...] = ("forked", "started", "plain", "plain-new-store")
    """See above."""
    ranks: tuple[int, ...] = (1, 2)
    """One per pretended node."""
    kills: int = 3
    """In each turn."""
    turns: int = 2
    """Of each kind."""
    small: bool = False
    """One kill each of two ranks with small-cnn, and no file with the result."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is started and killed."""

    kind: Kind
    model: str
    ranks: int

    def command(self, node: int, meeting: Rendezvous, directory: Path) -> tuple[list[str], dict[str, str]]:
        """Command line and environment of a node's torchrun."""
        python, marked = sys.executable, str(HERE / "marked_torchrun.py")
        environment = os.environ | {
            "MARKS": str(directory / "marks"), "NODE": str(node), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(HERE.parents[1]),
        }  # fmt: skip
        if self.kind.startswith("plain"):
            size, batch = MODELS[self.model]
            flags = [f"--image-size={size}", f"--batch-size={batch}", f"--checkpoint={directory / 'checkpoint.pt'}"]
            argv = [
                python, marked, f"--nnodes={self.ranks}", "--nproc-per-node=1", "--max-restarts=1000",
                "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{meeting.port}", "--rdzv-id=r",
                f"--rdzv-conf=is_host={int(node == 0)}", "--local-addr=127.0.0.1",
                str(HERE / "plain_ddp.py"), f"--data={directory}", f"--model={self.model}", *flags,
            ]  # fmt: skip
            own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.kind == "plain-new-store" else {}
            return argv, environment | own_store
        memory = node_directory(directory, node)
        rank = [
            "-m",
            "benchmarks.restart.marked_rank",
            "training",
            *spec_argv(directory / "spec.json", directory, 1, memory.path, data=FASHION_MNIST_DIRECTORY),
        ]
        if self.kind == "forked":
            environment["TORCHRELAY_PRELOAD"] = ",".join(trainer_program(has_data=True).preload)
        wrapped = [str(PROCESS_WRAPPER), "rank", str(directory / "logs"), str(memory.path)]
        program = [*wrapped, *rank] if self.kind == "forked" else [python, "-S", *wrapped, python, *rank]
        argv = torchrun_argv(replace(meeting, node=node), 1, "127.0.0.1", python, program)
        argv[argv.index(str(TORCHRUN)) : argv.index(str(TORCHRUN))] = [marked]
        argv.remove("-P")  # marks.py is beside the script
        return argv, torchrun_environment(meeting, environment)


def node_directory(directory: Path, node: int) -> NodeDir:
    """A node's directory, as its agent would make it."""
    return NodeDir(directory / "memory" / f"node-{node}")


@contextmanager
def prepared(case: Case) -> Iterator[Path]:
    """A run directory with what a case reads, in memory, as snapshots are."""
    size, batch = MODELS[case.model]
    config = TrainConfig(
        data=str(FASHION_MNIST_DIRECTORY), model=case.model, batch_size=batch, epochs=10_000, lr=0.05,
        image_size=None if case.model == "small-cnn" else size,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="torchrelay-restart-") as made:
        directory = Path(made)
        for node in range(case.ranks):
            for each in node_directory(directory, node).directories:
                each.mkdir(parents=True, exist_ok=True)
        for name in ("marks", "logs", "FashionMNIST"):
            (directory / name).mkdir()
        (directory / "FashionMNIST" / "raw").symlink_to(unpacked(directory))
        (directory / "spec.json").write_text(json.dumps({"training": asdict(Training(train=config))}))
        yield directory


def unpacked(directory: Path) -> Path:
    """The files of Fashion-MNIST as torchvision leaves them after its download."""
    import gzip  # noqa: PLC0415

    raw = directory / "raw"
    raw.mkdir()
    for path in FASHION_MNIST_DIRECTORY.glob("*.gz"):
        (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    return raw


@contextmanager
def torchrun(case: Case, node: int, meeting: Rendezvous, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The torchrun of a node: ours as an agent starts it, with SIGTERM ignored, and torch's as a shell does."""
    argv, environment = case.command(node, meeting, directory)
    if not case.kind.startswith("plain"):
        argv = [sys.executable, "-S", str(PROCESS_WRAPPER), "torchrun", *argv]
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


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    own = list(children(pid))
    return [*own, *(each for child in own for each in descendants(child))]


def wait_for_steps(
    directory: Path, case: Case, after: float, nodes: Sequence[subprocess.Popen[bytes]]
) -> list[marks.Mark]:
    """The marks since a time, once every rank has made a step. Raises TimeoutError if it does not come."""
    seconds = _RESTART_SECONDS if after else _START_SECONDS
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = marks.read(directory / "marks", after)
        if len({mark.who for mark in found if mark.name == "stepped"}) == case.ranks:
            return found
        if any(node.poll() is not None for node in nodes):
            logs = "\n".join(path.read_text()[-2000:] for path in (directory / "logs").iterdir())
            raise SystemExit(f"a torchrun of {case} has ended: {logs}")
        time.sleep(0.02)
    raise TimeoutError(f"{case} made no step within {seconds:.0f} s")


def parts_of(found: list[marks.Mark], killed_at: float, last: int) -> dict[str, float]:
    """Seconds of each part of a restart, and the total.

    Args:
        found: the marks since the kill.
        killed_at: time of the kill.
        last: the number of ranks, of each of which the last process counts.
    """
    parts, before = dict[str, float](), killed_at
    for part, names in PARTS.items():
        latest = {(mark.who, mark.name): mark.at for mark in found if mark.name in names}
        first = part == "notice" and last > 1
        at = (min if first else max)(latest.values()) if latest else before
        parts[part], before = max(0.0, at - before), max(at, before)
    return {**parts, "total": before - killed_at}


def measure(case: Case, kills: int) -> list[dict[str, float]]:
    """The parts of each restart. Of one after which no step came there is nothing, and nothing is killed after it."""
    results = list[dict[str, float]]()
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
                print(f"after {number} kills {error}", file=sys.stderr, flush=True)
                for mark in marks.read(directory / "marks", killed_at):
                    print(f"  {mark.at - killed_at:7.2f} s {mark.who} {mark.name}", file=sys.stderr)
                return [*results, {}]
            if number:
                results.append(parts_of(found, killed_at, case.ranks))
            time.sleep(_SECONDS_BETWEEN_KILLS)
            pids = {mark.who: mark.pid for mark in found if mark.name == "stepped"}
            killed_at = time.time()
            os.kill(pids[f"rank-{number % case.ranks}"], signal.SIGKILL)
    return results


def main() -> None:
    """Measure, print, write."""
    options = tyro.cli(Options, description=__doc__)
    if options.small:
        options = replace(options, models=("small-cnn",), ranks=(2,), kills=1, turns=1)
    measured_on, rows = record.machine(), []
    for model in options.models:
        for ranks in options.ranks:
            cases = [Case(kind=kind, model=model, ranks=ranks) for kind in options.kinds]
            found: dict[str, list[dict[str, float]]] = {case.kind: [] for case in cases}
            for _ in range(options.turns):
                for case in cases:
                    began = time.monotonic()
                    found[case.kind] += measure(case, options.kills)
                    print(f"{case}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            rows += [row(case, found[case.kind]) for case in cases]
    print(record.table(rows))
    if not options.small:
        record.write("restart", measured_on, rows)


def row(case: Case, all_of_them: list[dict[str, float]]) -> dict[str, object]:
    """The medians of a case, and all its restarts."""
    found = [each for each in all_of_them if each]
    named = {"model": case.model, "ranks": case.ranks, "kind": case.kind}
    if not found:
        return {**named, "hung": len(all_of_them)}
    totals = sorted(each["total"] for each in found)
    middle = {f"{part}, s": round(median(each[part] for each in found), 2) for part in found[0]}
    spread = {"least, s": round(totals[0], 2), "most, s": round(totals[-1], 2)}
    counts = {"restarts": len(found), "hung": len(all_of_them) - len(found)}
    return {**named, **middle, **spread, **counts, "all": found}


if __name__ == "__main__":
    main()
