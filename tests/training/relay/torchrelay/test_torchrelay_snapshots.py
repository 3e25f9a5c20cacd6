"""What a script saves, and what the saves cost it."""

import errno
import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.relay_script import StrictOwner
from torch import nn
from torchrelay.checkpoint_files import STATE_VALUES, find_damage, list_checkpoints, step_of
from torchrelay.rank_exchange import RankGroup
from torchrelay.saving.interval import SaveTimes
from torchrelay.saving.node_snapshots import SnapshotFiles
from torchrelay.saving.objects import Objects, capture
from torchrelay.saving.restoring import FORMAT, Restorer, read_state

ALONE = RankGroup(rank=0, local_rank=0, world_size=1, control=None)


class Weights(nn.Module):
    """A module with any tensors."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def content(step: int, size: int = 1000) -> Weights:
    return Weights(values=torch.full((size,), float(step)), count=torch.tensor(step))


def save(files: SnapshotFiles, model: nn.Module, step: int) -> None:
    captured = capture(Objects.of_script({"model": model}), step, ALONE)
    files.image(captured.layout.size_bytes).fill(captured.layout, captured.parts)
    values = {"format": FORMAT, "attempt": 1, "objects": captured.values}
    files.publish(step, {STATE_VALUES: json.dumps(values).encode()})


def read(path: Path) -> dict[str, torch.Tensor]:
    assert find_damage(path) == ""
    return read_state(path)[0]


def assert_saved(directory: Path, steps: list[int]) -> None:
    paths = list_checkpoints(directory)
    assert [step_of(path) for path in paths] == steps
    for path in paths:
        tensors = read(path)
        assert int(tensors["model/count"]) == step_of(path)
        assert bool((tensors["model/values"] == step_of(path)).all())


@pytest.fixture
def file_limit() -> Iterator[int]:
    """The most bytes of a file of this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield 100_000
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_without_space_for_the_next_the_newest_stays(tmp_path: Path, file_limit: int) -> None:
    files = SnapshotFiles(tmp_path)
    for step in range(4):
        save(files, content(step), step)
    with pytest.raises(OSError, match="File too large") as error:
        save(files, content(4, file_limit), 4)
    assert error.value.errno == errno.EFBIG
    assert_saved(tmp_path, [3])
    assert len(list(tmp_path.iterdir())) == 1, "half a snapshot is left"
    for step in (5, 6):
        save(files, content(step), step)
    assert_saved(tmp_path, [6, 5])


UNUSUAL: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "of a dtype that safetensors lacks": lambda: torch.tensor([1 + 2j, 3j], dtype=torch.complex128),
    "conjugate": lambda: torch.tensor([1 + 2j, 3j]).conj(),
}


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL.keys())
@pytest.mark.filterwarnings("ignore")  # torch's, about such tensors
def test_unusual_tensors_are_restored_as_they_are(tmp_path: Path, make: Callable[[], torch.Tensor]) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("other", make())
    expected = str(model.state_dict())
    files = SnapshotFiles(tmp_path)
    for step in range(3):
        save(files, model, step)
    states = list[Any]()

    class Taker(nn.Linear):
        def load_state_dict(self, state: Any, *_: Any, **__: Any) -> Any:
            states.append(state)

    objects = Objects.of_script({"model": Taker(3, 2)})
    restorer = Restorer(
        peers=ALONE, checkpoints=None, snapshots=tmp_path, objects=Objects(shared=objects.shared), owner=StrictOwner()
    )  # fmt: skip
    assert restorer.restore()
    assert str(states[0]) == expected


def test_copy_in_inference_mode_does_not_hinder_the_next(tmp_path: Path) -> None:
    model, files = content(0), SnapshotFiles(tmp_path)
    for step, mode in enumerate((True, True, False, True, False)):
        with torch.inference_mode(mode=mode):
            for tensor in model.state_dict().values():
                tensor.fill_(step)
            save(files, model, step)
        assert_saved(tmp_path, [step, step - 1][: step + 1])


def test_names_that_look_alike_are_different_tensors() -> None:
    class Odd(nn.Module):
        def state_dict(self, *_: Any, **__: Any) -> dict[Any, Any]:
            return {
                "a/b": torch.zeros(2),
                "a": {"b": torch.ones(2)},
                0: torch.full((2,), 2.0),
                "0": torch.full((2,), 3.0),
            }

    captured = capture(Objects.of_script({"model": Odd()}), 1, ALONE)
    assert sorted(float(part.tensor[0]) for part in captured.parts.values()) == [0, 1, 2, 3]


def test_interval_grows_with_what_a_save_costs() -> None:
    times = SaveTimes(seconds=0.0, max_overhead=0.01)
    times.record(1)
    assert times.due_by_time(0.0)
    assert not times.due_by_time(1000.0), "100,000 s later"
    assert not times.due_by_time(0.0, 1000.0), "10,000 s later"
    times.record(2, due=True)
    assert times.due_by_time(1000.0)
    assert not times.is_saved(2)
