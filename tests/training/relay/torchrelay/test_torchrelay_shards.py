"""Shards stay shards: each rank saves what it holds, nodes keep copies for each other, and torch reads a checkpoint."""

import json
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from support.relay_script import agent_variables
from support.trainings import run_forked, slow
from torchrelay.checkpoint_files import list_checkpoints, step_of

pytestmark = [
    pytest.mark.timeout(300),
    # Read from its metadata: importing torch here would take seconds.
    pytest.mark.skipif(tuple(map(int, version("torch").split(".")[:2])) < (2, 7), reason="no FSDP on CPUs"),
]
SAVED_AT, KILLED_AT, STEPS = (6, 9), 10, 14
# Each node has `per_node` ranks, and a directory for its memory.
SCRIPT = """
import json, os, signal, sys
mode, per_node, kill_at, end = sys.argv[1], *map(int, sys.argv[2:])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ |= {"LOCAL_RANK": str(rank % per_node), "TORCHRELAY_SNAPSHOTS": os.path.abspath(f"node-{rank // per_node}")}
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchrelay import state

distributed.init_process_group("gloo")
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(32, 62), nn.LayerNorm(62), nn.Tanh(), nn.Linear(62, 9))
data_rank, data_ranks = rank, world
if mode == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
elif mode == "fsdp1":
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
elif mode == "fsdp2":
    mesh = distributed.init_device_mesh("cpu", (world,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
elif mode == "hsdp":
    fully_shard(model, mesh=distributed.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards")))
else:
    mesh = distributed.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensors"))
    parallelize_module(model, mesh["tensors"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    model[1], model[2] = nn.Identity(), nn.Tanh()
    fully_shard(model, mesh=mesh["data"])
    data_rank, data_ranks = rank // 2, world // 2
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(1000, 32, generator=torch.Generator().manual_seed(1))
with state(model=model, optimizer=optimizer, snapshot_seconds=1000) as saved:
    restored = saved.step
    while saved.step < end:
        optimizer.zero_grad()
        images = data[24 * saved.step:][:24].chunk(data_ranks)[data_rank]
        model(images).square().mean().backward()
        optimizer.step()
        saved.step += 1
        if saved.step in SAVED_AT:
            saved.save(durable=False)
            saved._writer.wait()
        if saved.step == kill_at:
            distributed.barrier()
            if rank == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            distributed.barrier()
if mode == "fsdp1":
    with FullyShardedDataParallel.summon_full_params(model):
        weights = [parameter.detach().clone() for parameter in model.parameters()]
else:
    weights = [each.full_tensor() if hasattr(each, "full_tensor") else each.data for each in model.parameters()]
if rank == 0:
    print(json.dumps([restored, [weight.tolist() for weight in weights]]))
distributed.destroy_process_group()
""".replace("SAVED_AT", str(SAVED_AT))


def run(
    directory: Path, mode: str, nodes: int, per_node: int, *, kill_at: int = -1, end: int = STEPS
) -> "subprocess.CompletedProcess[str]":
    """Run the script on so many nodes, whose memory is `node-0`, `node-1` and so on."""
    directory.mkdir(exist_ok=True)
    words = (mode, str(per_node), str(kill_at), str(end))
    return run_forked(SCRIPT, *words, directory=directory, ranks=nodes * per_node, **agent_variables(directory / "run"))


def result(ran: "subprocess.CompletedProcess[str]") -> tuple[int, list[Any]]:
    """The step that was restored, and the weights at the end."""
    assert ran.returncode == 0, ran.stderr
    restored, weights = json.loads(ran.stdout)
    return restored, weights


def shards_of(node: Path) -> dict[str, list[int]]:
    """The steps of the snapshots in a node's memory, by the directory of a shard."""
    paths = {path.parent for path in node.rglob("step-*")}
    return {str(path.relative_to(node)): [step_of(each) for each in list_checkpoints(path)] for path in paths}


BOTH = {"shard-00000-of-00002": [9, 6], "shard-00001-of-00002": [9, 6]}


@pytest.mark.parametrize(
    ("mode", "per_node", "kept"),
    [
        ("fsdp2", 1, BOTH),
        ("ddp", 1, {".": [9, 6]}),
        ("fsdp1", 1, BOTH),
        slow("hsdp", 2, BOTH),
        slow("tp", 2, {f"shard-{index:05d}-of-00004": [9, 6] for index in range(4)}),
    ],
)
def test_lost_node_costs_the_steps_since_the_last_snapshot_and_no_bit(
    tmp_path: Path, mode: str, per_node: int, kept: dict[str, list[int]]
) -> None:
    _, weights = result(run(tmp_path / "undisturbed", mode, 2, per_node))
    assert run(tmp_path, mode, 2, per_node, kill_at=KILLED_AT).returncode != 0
    assert [shards_of(tmp_path / f"node-{node}") for node in range(2)] == [kept, kept]
    shutil.rmtree(tmp_path / "node-1")
    assert result(run(tmp_path, mode, 2, per_node)) == (SAVED_AT[-1], weights)


def test_fewer_ranks_go_on_from_the_copies_of_a_lost_nodes_shards(tmp_path: Path) -> None:
    _, weights = result(run(tmp_path / "undisturbed", "fsdp2", 3, 1))
    assert run(tmp_path, "fsdp2", 3, 1, kill_at=KILLED_AT).returncode != 0
    node = shards_of(tmp_path / "node-0")
    assert set(node) == {"shard-00000-of-00003", "shard-00002-of-00003"}, "its own, and a copy of the last node's"
    shutil.rmtree(tmp_path / "node-2")
    restored, others = result(run(tmp_path, "fsdp2", 2, 1))
    assert restored == SAVED_AT[-1]
    for one, other in zip(weights, others, strict=True):
        assert torch.allclose(torch.tensor(one), torch.tensor(other), atol=1e-5)
    assert set(shards_of(tmp_path / "node-0")) <= {"shard-00000-of-00002", "shard-00001-of-00002"}, "old ones stay"


def test_copy_on_another_node_replaces_a_damaged_shard(tmp_path: Path) -> None:
    _, weights = result(run(tmp_path / "undisturbed", "fsdp2", 2, 1))
    assert run(tmp_path, "fsdp2", 2, 1, kill_at=KILLED_AT).returncode != 0
    damaged = tmp_path / "node-1" / "shard-00001-of-00002"
    for file in damaged.glob("step-*/*.safetensors"):
        file.unlink()
    again = run(tmp_path, "fsdp2", 2, 1)
    assert result(again) == (SAVED_AT[-1], weights)
    assert f"rank 0: snapshot {damaged}/step-" in again.stderr, "rank 0 says what is damaged on node 1"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_a_sharded_checkpoint_without_torchrelay(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load  # torch 2.6 lacks the first

    _, weights = result(run(tmp_path, "fsdp2", 2, 1))
    [checkpoint] = list_checkpoints(tmp_path / "run" / "checkpoints")
    names = ["model/0.weight", "model/0.bias", "model/1.weight", "model/1.bias", "model/3.weight", "model/3.bias"]
    tensors = {name: torch.empty(torch.tensor(weight).shape) for name, weight in zip(names, weights, strict=True)}
    load(tensors, storage_reader=HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    assert [tensors[name].tolist() for name in names] == weights
    # Half as many ranks read it, too, and have nothing left to do.
    assert result(run(tmp_path, "fsdp2", 1, 1)) == (STEPS, weights)
