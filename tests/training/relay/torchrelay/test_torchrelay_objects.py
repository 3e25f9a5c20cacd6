"""The objects of a state: what may change between attempts, and what is refused."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.relay_script import StrictOwner, agent_variables
from support.trainings import run_forked
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchrelay.checkpoint_files import save_checkpoint, write_all
from torchrelay.rank_exchange import RankGroup
from torchrelay.saving.objects import Objects
from torchrelay.saving.restoring import Restorer
from torchrelay.saving.state_writer import StateWriter

ALONE = RankGroup(rank=0, local_rank=0, world_size=1, control=None)


class Training:
    """A model, compiled, wrapped or as it is, with what usually belongs to it."""

    def __init__(self, wrap: Any) -> None:
        plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
        self.plain, self.model = plain, wrap(plain)
        self.average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.5**step)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def step(self) -> None:
        self.scaler.scale(self.plain(torch.randn(4, 3, 4, 4)).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.average.update_parameters(self.plain)

    @property
    def objects(self) -> Objects:
        return Objects.of_script(
            {
                "model": self.model, "average": self.average, "optimizer": self.optimizer, "schedule": self.schedule,
                "scaler": self.scaler,
            }
        )  # fmt: skip

    @property
    def content(self) -> str:
        states = (each.state_dict() for each in (self.plain, self.average, self.optimizer, self.schedule, self.scaler))
        return str([*states, torch.get_rng_state()])


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def as_it_is(model: nn.Module) -> nn.Module:
    return model


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (DistributedDataParallel, as_it_is),
        (compiled, DistributedDataParallel),
        (as_it_is, lambda model: compiled(DistributedDataParallel(model))),
    ],
)
@pytest.mark.parametrize("durable", [False, True])
def test_model_may_be_wrapped_in_another_way_later(tmp_path: Path, first: Any, second: Any, *, durable: bool) -> None:
    before, after = Training(first), Training(second)
    checkpoints, snapshots = tmp_path / "checkpoints", tmp_path / "snapshots"
    writer = StateWriter(
        peers=ALONE, objects=before.objects, checkpoints=checkpoints, snapshots=None if durable else snapshots, keep=2,
        owner=StrictOwner(), attempt=1,
    )  # fmt: skip
    for step in (1, 2, 3):
        before.step()
        writer.save(step, durable=durable)
        writer.wait()
    content = before.content
    restorer = Restorer(
        peers=ALONE, checkpoints=checkpoints, snapshots=snapshots, objects=after.objects, owner=StrictOwner()
    )
    restored = restorer.restore()
    assert restored
    assert (restored.step, restored.durable) == (3, durable)
    assert after.content == content
    torch.manual_seed(5)
    before.step()
    torch.manual_seed(5)
    after.step()
    assert after.content == before.content, "it goes on otherwise"


def run(directory: Path, program: str, ranks: int = 1) -> "subprocess.CompletedProcess[str]":
    return run_forked(program, directory=directory, ranks=ranks, **agent_variables(directory / "run"))


OBJECTS = """
import torch
from torchrelay import state
model = torch.nn.Linear(2, 2)
with state(model=model, {more}) as saved:
    saved.step += 1
"""
MORE = "optimizer=torch.optim.SGD(model.parameters())"


@pytest.mark.parametrize(("before", "after"), [("", MORE), (MORE, "")])
def test_object_that_is_added_or_dropped_is_named(tmp_path: Path, before: str, after: str) -> None:
    assert run(tmp_path, OBJECTS.format(more=before)).returncode == 0
    refused = run(tmp_path, OBJECTS.format(more=after))
    assert refused.returncode != 0
    lists = ["model" + (", optimizer" if more else "") for more in (before, after)]
    assert f"the saved state is of {lists[0]}, and state() got {lists[1]}" in refused.stderr
    assert run(tmp_path, OBJECTS.format(more=before)).returncode == 0, "the state is lost"


DIFFERENT = """
import os
import torch
from torch import distributed
from torchrelay import state
distributed.init_process_group("gloo")
model = torch.nn.Linear(2, 2 + int(os.environ["RANK"]))
with state(model=model) as saved:
    saved.step = 1
    saved.save(durable=True)
"""


def test_ranks_with_different_tensors_are_refused(tmp_path: Path) -> None:
    refused = run(tmp_path, DIFFERENT, ranks=2)
    assert refused.returncode != 0
    assert "RuntimeError: state(): rank 0 and rank 1 have different tensors, such as model/bias (2,) torch.float32" in (
        refused.stderr
    )
    assert not (tmp_path / "run" / "checkpoints").exists()


ODD_ON_RANK_1 = """
import os, sys
import numpy
from torch import distributed
from torchrelay import state
distributed.init_process_group("gloo")
class Count:
    value = 0
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, state): self.value = state["value"]
count, odd = Count(), numpy.float64(0.5) if os.environ["RANK"] == "1" else 0.5
if sys.argv[1] == "before the first step":
    count.value = odd
with state(count=count) as saved:
    print("begun")
    count.value, saved.step = odd, 1
"""


@pytest.mark.parametrize("when", ["before the first step", "later"])
def test_error_of_one_rank_ends_the_others_with_its_reason(tmp_path: Path, when: str) -> None:
    (tmp_path / "run").mkdir()
    refused = run_forked(ODD_ON_RANK_1, when, directory=tmp_path, ranks=2, **agent_variables(tmp_path / "run"))
    assert refused.returncode != 0
    for error in ("TypeError: ", "OtherRankError: rank 1: "):
        assert f"{error}state(count=...): its state_dict() holds more than tensors, numbers and texts" in refused.stderr
    assert ("begun" in refused.stdout) == (when == "later"), "as soon as it can be known"
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


RESUMED = """
import torch
from torch import distributed
from torchrelay import state
distributed.init_process_group("gloo")
with state(model=torch.nn.Linear(2, 2)) as saved:
    saved.step += 1
"""


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"state.pt": b"a pickle"}, "state.pt instead of state.safetensors and state.json"),
        ({"state.safetensors": b"", "state.json": b'{"format": 2}'}, "format 2 instead of 1"),
    ],
)
def test_checkpoint_of_another_version_is_refused_by_all_ranks_and_kept(
    tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    (tmp_path / "run").mkdir()
    path = save_checkpoint(tmp_path / "run" / "checkpoints", 9, lambda directory: write_all(directory, files), 2)
    refused = run(tmp_path, RESUMED, ranks=2)
    assert refused.returncode != 0
    sentence = f"OtherFormatError: step-00000009 has {message}: end the run with the version that began it"
    assert sentence in refused.stderr
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.name in files} == files
    assert [each.name for each in path.parent.iterdir()] == [path.name]
