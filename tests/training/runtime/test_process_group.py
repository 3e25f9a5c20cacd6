"""Collectives between real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cluster import ROOT, tiny_data
from support.trainings import Starter
from torch import Tensor, distributed

from jobs.ranks.rendezvous import pick_port
from training.runtime.process_group import connect, disconnect
from training.runtime.run_context import rank_info_from

CONNECT = """
import json, os, sys
from torch import distributed
from training.runtime.process_group import connect, disconnect
from training.runtime.run_context import rank_info_from
group = connect(rank_info_from(os.environ))
"""


def ranks(*programs: str) -> list["subprocess.CompletedProcess[str]"]:
    """Run a program as each rank."""
    port = str(pick_port())
    started = []
    for rank, program in enumerate(programs):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(programs), "LOCAL_WORLD_SIZE": len(programs)}
        environment = {**os.environ, **{name: str(number) for name, number in numbers.items()}}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", program],
                cwd=ROOT,
                env=environment,
                stdout=pipe,
                stderr=pipe,
                text=True,
            )
        )
    found = []
    for process in started:
        output, errors = process.communicate(timeout=200)
        found.append(subprocess.CompletedProcess(process.args, process.returncode, output, errors))
    return found


def test_rank_that_comes_first_is_not_refused_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    late = CONNECT.replace("group =", "import time; time.sleep(2); group =")
    zero, one = ranks(late, CONNECT)
    assert (zero.returncode, one.returncode) == (0, 0), zero.stderr + one.stderr
    assert "The client socket has connected to" in one.stderr
    assert "not yet listening" not in one.stderr, "it waits before it tries again"


def test_every_rank_has_the_values_of_all() -> None:
    values = [{"accuracy": 0.1 + 0.2, "path": "ä\udcff"}, None, [1, [2, "x" * 1000]]]
    programs = [f"{CONNECT}print(json.dumps(group.all_gather_json({value!r}))); disconnect()" for value in values]
    for done in ranks(*programs):
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == values


def sent_tensors() -> dict[str, Tensor]:
    """Each with what may get lost: a type, the bits of a NaN, a memory format, one that is empty or larger than 64."""
    generator = torch.Generator().manual_seed(1)
    return {
        "weights": torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last),
        "step": torch.tensor(3.0),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "nan": torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32),
        "count": torch.tensor(2**60),
        "none": torch.empty(0, 5),
        "transposed": torch.arange(6, dtype=torch.int16).view(2, 3).t(),
    }


def receive_tensors() -> None:
    """In a rank: receive rank 1's, in buckets of 64 bytes."""
    from training.runtime import process_group

    process_group._BUCKET_BYTES = 64  # noqa: SLF001
    group, sent, sizes = connect(rank_info_from(os.environ)), sent_tensors(), list[int]()
    broadcast = distributed.broadcast

    def measure(tensor: Tensor, source: int, **options: Any) -> Any:
        sizes.append(0 if options else tensor.nbytes)
        return broadcast(tensor, source, **options)

    distributed.broadcast = measure
    received = dict(group.broadcast_tensors(sent if group.rank == 1 else {"ignored": torch.zeros(9)}, source=1))
    disconnect()
    assert received.keys() == sent.keys()
    for name, value in sent.items():
        assert (received[name].dtype, received[name].shape) == (value.dtype, value.shape), name
        same = torch.equal(received[name].contiguous().flatten().view(torch.uint8), value.flatten().view(torch.uint8))
        assert same, name
    *buckets, largest = sorted(sizes)
    assert largest == sent["weights"].nbytes
    assert all(size <= 64 for size in buckets)
    sys.exit(0)


def test_every_rank_receives_the_tensors_of_one_bit_by_bit_in_buckets(start: Starter) -> None:
    training = start(world_size=3, prepare=receive_tensors)
    assert training.wait() == [0, 0, 0], training.output()


def test_pickle_of_a_process_that_poses_as_a_rank_is_not_read(tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    impostor = f"""
class Pickled:
    def __reduce__(self):
        return os.system, ("touch {evil}",)
distributed.all_gather_object([None, None], Pickled(), group=group.control)
"""
    victim, _ = ranks(CONNECT + "group.all_gather_json(True)", CONNECT + impostor)
    assert not evil.exists()
    assert "Error" in victim.stderr.splitlines()[-1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_nothing_is_unpickled_in_a_training(tmp_path: Path, strategy: str) -> None:
    """Neither by the trainer nor by what it uses of torch."""
    data = tiny_data(tmp_path / "data", 256, 64)
    flags = [f"--data={data}", f"--run-dir={tmp_path}", "--epochs=2", "--batch-size=64", f"--strategy={strategy}"]
    program = f"""
import runpy, sys
from torch.distributed import distributed_c10d
del distributed_c10d._unpickler
sys.argv[1:] = {flags!r}
runpy.run_module("training", run_name="__main__", alter_sys=True)
"""
    for done in ranks(program, program):
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "final").exists()
