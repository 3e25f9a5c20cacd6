"""The fixtures of the trainer's tests."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.trainings import Ask, Starter, Training, make_cifar, make_folder, make_idx, pack_folder

from hpc.base.program import run as run_program
from hpc.run.nodedir import NodeDir
from training.inference import predict
from training.runtime.process_group import ProcessGroup, connect, disconnect
from training.runtime.run_context import rank_info_from
from training.verify_resume.local_launch import prepare_server


@pytest.fixture(scope="session", autouse=True)
def _rank_server() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # as in a job, whatever is set here: idle threads would take the cores' time
    prepare_server()


@pytest.fixture(scope="session")
def idx_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idx(tmp_path_factory.mktemp("data") / "idx")


@pytest.fixture(scope="session")
def folder_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("data") / "folder")


@pytest.fixture(scope="session")
def packed_data(folder_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image folder, packed."""
    return pack_folder(folder_data, tmp_path_factory.mktemp("data") / "packed")


@pytest.fixture(scope="session")
def cifar_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cifar(tmp_path_factory.mktemp("data") / "cifar-10-batches-py")


@pytest.fixture
def start(idx_data: Path, tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(idx_data, tmp_path)
    yield starter
    for training in starter.started:
        training.kill()


@pytest.fixture
def cut(start: Starter, killed_once: Training) -> Training:
    """A copy of the training that a module's `killed_once` has killed."""
    return start.copy(killed_once)


@pytest.fixture
def node(start: Starter, killed_once: Training) -> NodeDir:
    """A copy of its node's memory."""
    return NodeDir(shutil.copytree(killed_once.run_dir.with_name("node"), start.directory / "node"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread, as a rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run `python -m training.inference.predict ...`, or another program: its exit code, stdout and stderr."""

    def run(*arguments: object, program: Callable[[], int] = predict.main) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
        code = run_program(program, words=sys.argv)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def group(one_thread: None) -> Iterator[ProcessGroup]:  # noqa: ARG001  # for what it does
    """This process as the only rank."""
    yield connect(rank_info_from({}))
    disconnect()
