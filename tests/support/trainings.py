"""What the trainer's tests share: tiny data sets, and ranks as real processes.

Ranks are forked from a server that has imported torch already, so a whole training takes about a second.
"""

import contextlib
import gzip
import io
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from hpc.base.transport import pick_port
from hpc.run.events import ledger
from hpc.run.rundir import RunDir
from jobs.ranks.helper_processes import protect_helper_processes
from jobs.ranks.script.forked_script import run_script
from support.cluster import ROOT, checked_json
from support.events import record_of
from training.verify_resume.local_launch import kill_ranks, start_ranks, wait_for_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from training.data.batch_schedule import BatchRequest
    from training.data.dataset import Data
    from training.data.loader import Batch, ImageSource
    from training.engine.trainer import Trainer
    from training.runtime.process_group import ProcessGroup

_TIMEOUT_SECONDS = 300
slow = partial(pytest.param, marks=pytest.mark.slow)
needs_compiler = pytest.mark.skipif(not (shutil.which("cc") and shutil.which("c++")), reason="needs a C++ compiler")
# The fixture `ask`: runs a program with arguments, and returns its exit code, stdout and stderr.
Ask = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True, kw_only=True)
class Training:
    """The ranks of one attempt at a training."""

    run_dir: Path
    log: Path
    ranks: list[BaseProcess]

    def wait(self) -> list[int | None]:
        """The exit codes by rank."""
        for rank in self.ranks:
            rank.join(_TIMEOUT_SECONDS)
        return [rank.exitcode for rank in self.ranks]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not condition():
            assert any(rank.is_alive() for rank in self.ranks), f"the ranks ended early:\n{self.output()}"
            assert time.monotonic() < deadline, f"timeout:\n{self.output()}"
            time.sleep(0.002)

    def kill(self) -> None:
        """SIGKILL for all ranks."""
        kill_ranks(self.ranks)

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole JSON lines of a file."""
    return (
        [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if (path.exists())
        else []
    )


def children(pid: int) -> list[int]:
    """The processes that a process has started, in its first thread."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_the_end_of(pid: int) -> None:
    """Until a process has ended, or is a zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """The events of that kind, or the problems of that name, of all attempts."""
    files = sorted((run_dir / "events").glob("*.jsonl"))
    found = [ledger.decoded(line) for file in files for line in file.read_bytes().splitlines()]
    return [record_of(event) for event in found if name in {event.kind, getattr(event, "what", None)}]


def documented(program: str, code: int, out: str, err: str) -> Any:
    """What a program with --json has printed, which must have the documented shape."""
    done = subprocess.CompletedProcess([program], code, out, err)
    return json.loads(checked_json((program, "--json"), done).stdout)


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in lines(run_dir / "metrics" / "train.jsonl")]


def result(run_dir: Path, model: str = "final") -> dict[str, Any]:
    """What was measured of the last model, or of the `best` one."""
    return dict(json.loads((run_dir / model / "result.json").read_text()))


def final(run_dir: Path) -> "dict[str, Tensor]":
    """The weights of the last model."""
    from safetensors.torch import load_file

    return load_file(run_dir / "final" / "model.safetensors")


def same(one: "dict[str, Tensor]", other: "dict[str, Tensor]") -> bool:
    """Whether all bits are the same."""
    return one.keys() == other.keys() and all(value.equal(other[name]) for name, value in one.items())


class Starter:
    """Starts attempts at trainings."""

    def __init__(self, data: Path, directory: Path) -> None:
        self.data, self.directory = data, directory
        self.started: list[Training] = []

    def __call__(
        self,
        *flags: str,
        run: str = "run",
        world_size: int = 1,
        data: list[Path] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> Training:
        """Start all ranks of a training; each start with the same `run` is another attempt at it.

        `data` has a directory for each rank; `prepare` is called in each rank before it begins.
        """
        run_dir = self.directory / run
        attempt = 1 + sum(training.run_dir == run_dir for training in self.started)
        log = self.directory / f"{run}-{attempt}.log"
        common = ["--run-dir", str(run_dir), "--attempt", str(attempt), *flags]
        argvs = [["--data", str(data[rank] if data else self.data), *common] for rank in range(world_size)]
        training = Training(run_dir=run_dir, log=log, ranks=start_ranks(argvs, log, prepare))
        self.started.append(training)
        return training

    def copy(self, training: Training, run: str = "run") -> Training:
        """Take over a copy of another one's run, whose attempts count."""
        copy = Training(run_dir=self.directory / run, log=training.log, ranks=[])
        shutil.copytree(training.run_dir, copy.run_dir)
        self.started += [copy] * len(list(training.run_dir.parent.glob(f"{training.run_dir.name}-*.log")))
        return copy

    def complete(
        self, *flags: str, run: str = "run", world_size: int = 1, prepare: Callable[[], None] | None = None
    ) -> Training:
        """Train to the end."""
        training = self(*flags, run=run, world_size=world_size, prepare=prepare)
        codes = training.wait()
        assert codes == [0] * world_size, training.output()
        assert (training.run_dir / "final" / "result.json").exists(), training.output()
        return training


def run_forked(
    program: str, *words: str, directory: Path, ranks: int = 1, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run the text of a program in a directory, in ranks that are forks of a process which has imported torch.

    Once a rank has failed, the others are ended, as by torchrun. The exit code is the first that is not 0.
    """
    (directory / "script.py").write_text(program)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(pick_port()), "WORLD_SIZE": str(ranks)}
    files = [directory / name for name in ("stdout", "stderr")]
    for file in files:
        file.unlink(missing_ok=True)
    started = []
    for rank in map(str, range(ranks)):
        place = {**common, "RANK": rank, "LOCAL_RANK": rank, **environment}
        process = multiprocessing.get_context("forkserver").Process(target=_run_rank, args=(directory, words, place))
        process.start()
        started.append(process)
    codes = wait_for_ranks(started, grace_seconds=10)
    stdout, stderr = (file.read_text() for file in files)
    return subprocess.CompletedProcess(words, next(filter(None, codes), 0), stdout, stderr)


def _run_rank(directory: Path, words: tuple[str, ...], environment: dict[str, str]) -> None:
    """Runs in the process of a rank."""
    os.chdir(directory)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), descriptor)
    os.environ |= environment
    # A process wrapper has inserted this directory, and a rank ignores signals until its script handles them.
    sys.path.insert(0, str(ROOT))
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    protect_helper_processes()
    run_script([str(directory / "script.py"), *words])


def load(path: Path, **settings: object) -> "Data":
    """The data in a directory, with these flags; images of a folder become 16 x 16 pixels."""
    from training.config.dataset_layout import check_data
    from training.config.train_config import TrainConfig
    from training.data.build import load_data

    config = TrainConfig(data=str(path), **settings)  # type: ignore[arg-type]  # any of its fields
    return load_data(config, check_data(path), folder_size=config.image_size or 16)


def asked(source: "ImageSource", requests: "list[BatchRequest]", workers: int = 0) -> "list[Batch]":
    """What a loader with as many workers answers."""
    from training.data.loader import load_batches

    with load_batches(source, requests, workers, pin_memory=False) as batches:
        return list(batches)


def trainer_with(group: "ProcessGroup", data: Path, directory: Path, **settings: object) -> "Trainer":
    """A trainer in this process, with these flags; a step has 20 images."""
    from training.config.train_config import TrainConfig
    from training.engine.launch import make_trainer
    from training.runtime.run_context import RunContext

    config = TrainConfig(**{"data": str(data), "batch_size": 20, **settings})  # type: ignore[arg-type]  # its fields
    return make_trainer(RunContext(config=config, run_dir=RunDir(directory), attempt=1, started=0.0), group)


def agree_at_each_step() -> None:
    """In a rank: exchange flags at every boundary, however short the steps are."""
    from torchrelay import stop_consensus

    stop_consensus._MAX_INTERVAL = 1  # noqa: SLF001


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write an IDX file of bytes, compressed if its name says so."""
    header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    data = header + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def make_idx(directory: Path, train: int = 203, test: int = 101, size: int = 12, classes: int = 3) -> Path:
    """A data set that can be learned: a class is a bright band at some height, under noise."""
    directory.mkdir(parents=True)
    random = np.random.default_rng(1)
    for part, count in (("train", train), ("t10k", test)):
        labels = np.arange(count) % classes
        images = random.integers(0, 200, (count, size, size))
        for label in range(classes):
            band = slice(label * size // classes, (label + 1) * size // classes)
            images[labels == label, band] += 20
        write_idx(directory / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(directory / f"{part}-labels-idx1-ubyte", labels)
    return directory


def make_folder(directory: Path, parts: tuple[str, ...] = ("train", "val", "test"), per_class: int = 9) -> Path:
    """Class directories of noisy images in one color each."""
    random = np.random.default_rng(2)
    for part in parts:
        for channel, name in enumerate(("blue sky", "green", "red")):
            (directory / part / name).mkdir(parents=True)
            for number in range(per_class):
                pixels = random.integers(0, 120, (40, 50, 3))
                pixels[..., 2 - channel] += 120
                image = Image.fromarray(pixels.astype(np.uint8))
                image.save(directory / part / name / f"{number}.{'png' if number % 2 else 'jpg'}")
    return directory


def pack_folder(folder: Path, packed: Path) -> Path:
    """Pack images in 40 x 40 pixels."""
    command = [sys.executable, "-m", "training.pack", str(folder), str(packed), "--size", "40"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return packed


class _Python2Pickler(pickle._Pickler):  # noqa: SLF001  # the one in Python, which can be extended
    """Pickles text and bytes as Python 2 did, in which the published CIFAR files were written."""

    def save_bytes(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + len(value).to_bytes(4, "little") + value)

    def save_text(self, value: str) -> None:
        self.save_bytes(value.encode())

    dispatch: ClassVar = pickle._Pickler.dispatch | {bytes: save_bytes, str: save_text}  # noqa: SLF001


def pickled_as_published(content: dict[str, object]) -> bytes:
    """As Python 2 and the numpy of its time did it."""
    buffer = io.BytesIO()
    _Python2Pickler(buffer, protocol=2).dump(content)
    return buffer.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def make_cifar(directory: Path, kind: str = "cifar10", per_file: int = 30) -> Path:
    """Random images in the files of CIFAR-10 (of 3 classes) or CIFAR-100 (of 3 fine ones)."""
    from training.config.dataset_layout import CIFAR

    directory.mkdir(parents=True)
    random = np.random.default_rng(3)
    labels = (np.arange(per_file) % 3).tolist()
    files = CIFAR[kind]  # type: ignore[index]  # one of its keys
    for name in (*files.train, files.test):
        rows = random.integers(0, 256, (per_file, 3, 32, 32)).astype(np.uint8).reshape(per_file, -1)
        content = {files.label_key: labels, "batch_label": name, "coarse_labels": [0] * per_file}
        (directory / name).write_bytes(pickled_as_published({"data": rows, **content}))
    names = {files.names_key: ["frog", "ship", "truck"], "num_vis": 3072}
    (directory / files.meta).write_bytes(pickled_as_published(names))
    return directory
