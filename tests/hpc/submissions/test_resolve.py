import pytest
from hpc.submissions.gpu_use import resolve_device

from hpc.base.errors import UserError
from hpc.base.node_info import TorchBuild
from hpc.slurm.client import TESTBED_DIRECTORY

FOR_GPUS, FOR_CPUS = TorchBuild(version="2.15", accelerator="CUDA 13.2"), TorchBuild(version="2.15", accelerator=None)


def on_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")


def test_gpus_that_were_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cluster(monkeypatch)
    assert resolve_device("auto", 4, "slurm", FOR_GPUS) == "cuda"
    assert resolve_device("auto", 4, "slurm", None) == "cuda", "of another environment's torch nothing is known"
    assert resolve_device("cpu", 4, "slurm", FOR_CPUS) == "cpu"
    assert resolve_device("auto", 0, "slurm", FOR_CPUS) == "auto"


def test_gpus_of_a_testbed_are_pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(TESTBED_DIRECTORY / "slurm.conf"))
    assert resolve_device("auto", 4, "slurm", FOR_GPUS) == "auto"
    assert resolve_device("cuda", 4, "slurm", FOR_GPUS) == "cuda"


def test_devices_that_there_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cluster(monkeypatch)
    with pytest.raises(UserError, match=r"torch 2\.15 is built for CPUs alone: install one for GPUs, or"):
        resolve_device("auto", 1, "slurm", FOR_CPUS)
    with pytest.raises(UserError, match="--device is cuda, but --gpus-per-node 0 asks for no GPUs: leave one of them"):
        resolve_device("cuda", 0, "slurm", FOR_GPUS)
