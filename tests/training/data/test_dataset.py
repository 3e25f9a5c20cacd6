"""Reading data: the formats, the parts, and the loader."""

import gc
import gzip
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cluster import ROOT, need
from support.real_images import needs_fashion_mnist
from support.trainings import children, load, make_folder, make_idx, write_idx

from hpc.base import kernel
from hpc.base.errors import UserError
from training.config.dataset_layout import check_data, resolve_data
from training.data import in_memory, loader
from training.data.batch_schedule import BatchRequest
from training.data.in_memory import class_names, read_digits, read_idx, read_idx_pair
from training.data.loader import Batch, load_batches


def test_forks_of_a_process_that_has_read_the_data_read_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_idx(tmp_path / "data")
    before = read_idx_pair(directory, "train")
    monkeypatch.setattr(in_memory, "_kept", {})
    monkeypatch.setattr(sys, "argv", ["torchrun", f"--data={directory}"])
    in_memory.keep_data()
    for path in directory.iterdir():
        path.write_bytes(b"")
    after = read_idx_pair(directory, "train")
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a", b"\0\0\x08\x01\0\0\0\x05abc", r"holds 3 bytes of data where its header says \[5\]"),
        ("a", b"hello", "is not an IDX file of unsigned bytes"),
        ("a.gz", gzip.compress(b"\0\0\x08\x01\0\0\0\x05abcde", mtime=0)[:-9], "cannot be read"),
    ],
)
def test_a_torn_idx_file_is_named(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{tmp_path / name} {reason}"):
        read_idx(tmp_path / name)


def test_images_and_labels_of_different_number_are_no_pair(tmp_path: Path) -> None:
    data = make_idx(tmp_path / "data")
    write_idx(data / "train-labels-idx1-ubyte", np.zeros(7))
    with pytest.raises(UserError, match="not a pair"):
        read_idx_pair(data, "train")


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    everything, directory = load_digits(), resolve_data("digits")
    layout = check_data(directory)
    assert (layout.kind, layout.train, layout.val, layout.test) == ("digits", directory, None, directory)
    parts = [read_digits(directory, part) for part in ("train", "test")]
    assert [images.shape for images, _ in parts] == [(1437, 1, 8, 8), (360, 1, 8, 8)]
    images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    assert torch.equal(labels, torch.from_numpy(everything.target))
    assert (images.dtype, images.max()) == (torch.uint8, 255)
    assert torch.equal((images[:, 0].double() / 255 * 16).round(), torch.from_numpy(everything.images))
    data = load(directory)
    assert (data.classes, data.channels, data.shape) == (tuple("0123456789"), 1, (8, 8))


@needs_fashion_mnist
def test_fashion_mnist_is_recognised_by_its_labels() -> None:
    _, labels = read_idx_pair(resolve_data("fashion-mnist"), "train")
    assert class_names(labels, 10)[8:] == ("Bag", "Ankle boot")
    assert class_names(labels[1:], 10) == tuple("0123456789")


def test_a_part_is_held_out_by_seed(idx_data: Path) -> None:
    data, again, other = load(idx_data), load(idx_data), load(idx_data, seed=1)
    assert data.val is not None
    assert (len(data.train), len(data.val)) == (193, 10)
    request = BatchRequest(indices=tuple(range(10)), epoch=None)
    images = [whole.val[request].images for whole in (data, again, other) if whole.val]
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])
    assert load(idx_data, val_split=0.0).val is None


def test_nothing_is_held_out_of_data_with_a_validation_set(folder_data: Path) -> None:
    data = load(folder_data)
    assert data.classes == ("blue sky", "green", "red")
    assert data.val is not None
    assert data.test is not None
    assert (len(data.train), len(data.val), len(data.test)) == (27, 27, 27)
    assert load(folder_data / "train", val_split=0.2).test is None


def test_the_fingerprint_is_that_of_the_data_not_of_their_place(tmp_path: Path) -> None:
    one, two = (load(make_folder(tmp_path / name)) for name in ("one", "two"))
    assert one.fingerprint == two.fingerprint
    (tmp_path / "two" / "train" / "red" / "0.jpg").unlink()
    assert load(tmp_path / "two").fingerprint != one.fingerprint


def test_loader_workers_do_not_keep_the_gpus_of_their_rank(
    folder_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_GPU_FILES", str(tmp_path / "nvidia"))
    source, before = load(folder_data).train, set(children(os.getpid()))
    requests = [BatchRequest(indices=(index,), epoch=0) for index in range(20)]
    with ExitStack() as files:
        for name in ("nvidia0", "nvidiactl", "other"):
            files.enter_context((tmp_path / name).open("w"))
        with load_batches(source, requests, workers=2, pin_memory=False) as batches:
            assert len(list(islice(batches, 2))) == 2, "one of each worker"
            workers = set(children(os.getpid())) - before
            assert len(workers) == 2
            for worker in workers:
                assert open_in(worker, tmp_path) == {"other"}
        assert open_in(os.getpid(), tmp_path) == {"nvidia0", "nvidiactl", "other"}


class CollectsGarbage:
    """Images whose reader collects all garbage first."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _request: BatchRequest) -> Batch:
        gc.collect()
        return Batch(*[torch.zeros(1)] * 4)

    def name(self, _index: int) -> str:
        return ""


class Mourned:
    """Garbage with a cycle, which notes the process that destroys it, as a tensor of a GPU would abort it."""

    def __init__(self, file: Path) -> None:
        self.file, self.cycle = file, self

    def __del__(self) -> None:
        self.file.write_text(str(os.getpid()))


def test_loader_workers_leave_the_garbage_of_their_rank_alone(tmp_path: Path) -> None:
    gc.disable()
    try:
        Mourned(tmp_path / "destroyed by")
        with load_batches(CollectsGarbage(), [BatchRequest(indices=(0,), epoch=0)], 1, pin_memory=False) as batches:
            assert len(list(batches)) == 1
        assert not (tmp_path / "destroyed by").exists()
    finally:
        gc.enable()
    gc.collect()
    assert (tmp_path / "destroyed by").read_text() == str(os.getpid()), "the rank itself collects it later"


FULL_MEMORY = """
import sys
import torch
from training.data.batch_schedule import BatchRequest
from training.data.loader import Batch, load_batches

class Source:
    def __getitem__(self, request):
        return Batch(*[torch.zeros(1)] * 4)

with load_batches(Source(), [BatchRequest(indices=(0,), epoch=0)], int(sys.argv[1]), pin_memory=False) as batches:
    print(len(list(batches)))
"""


def test_full_memory_of_a_node_is_named_and_keeps_only_workers_from_starting() -> None:
    need("unshare", "mount")
    mount = "mount -t tmpfs -o size=4k none /dev/shm; head -c 4096 /dev/zero >/dev/shm/filler"
    words = ["unshare", "--mount", "sh", "-ec", f'{mount}; exec "$@"', "sh", sys.executable, "-c", FULL_MEMORY]
    without, with_one = (
        subprocess.run([*words, workers], cwd=ROOT, capture_output=True, text=True, check=False) for workers in "01"
    )
    assert without.stdout == "1\n", without.stderr
    assert with_one.stderr.endswith("OSError: [Errno 28] No space left on device: '/dev/shm'\n")


def open_in(process: int, directory: Path) -> set[str]:
    """The names of a directory's files that a process has open."""
    paths = [Path(link).resolve() for link in Path(f"/proc/{process}/fd").iterdir()]
    return {path.name for path in paths if path.parent == directory}


_hanging: list[bool] = []
"""Whether each of the next forks hangs, the last one first."""


def _fork() -> None:
    if _hanging and _hanging[-1]:
        while True:
            time.sleep(60)


os.register_at_fork(after_in_child=_fork, after_in_parent=lambda: _hanging.pop() if _hanging else None)


def test_worker_that_hangs_in_its_fork_is_replaced(
    folder_data: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loader, "_START_SECONDS", 2.0)
    source, before = load(folder_data).train, set(children(os.getpid()))
    requests = (BatchRequest(indices=(index,), epoch=0) for index in range(20))
    _hanging[:] = [True, False]
    with load_batches(source, requests, workers=2, pin_memory=False) as batches:
        assert not _hanging
        assert [batch.indices.tolist() for batch in batches] == [[index] for index in range(20)]
        assert "loader workers did not start within 2 s: starting others" in capfd.readouterr().out
    assert set(children(os.getpid())) <= before


def test_loader_workers_survive_the_signals_that_stop_a_rank(folder_data: Path) -> None:
    source = load(folder_data).train
    before = set(children(os.getpid()))
    requests = [BatchRequest(indices=(index % 27,), epoch=0) for index in range(200)]
    with load_batches(source, requests, workers=2, pin_memory=False) as batches:
        workers = set(children(os.getpid())) - before
        assert len(workers) == 2
        for worker in workers:
            for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
                os.kill(worker, number)
        assert len(list(batches)) == 200
    assert not set(children(os.getpid())) & workers
