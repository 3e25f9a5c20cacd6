"""The preflight: its report of ranks that pass, and of one whose device computes wrongly."""

import importlib.metadata
import os
import platform
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from support.events import assert_typed
from support.trainings import Starter, events
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, but not in __all__

from hpc.base.errors import EXIT_BAD_NODE, BadNodeError, TorchrelayError, UserError
from hpc.run.rundir import RunDir
from training.engine import preflight
from training.engine.preflight import count_wrong, run_preflight
from training.runtime.fault_injection import parse_fault
from training.runtime.process_group import ProcessGroup
from training.runtime.rank_device import choose_device, device_of_the_node, find_device
from training.runtime.run_context import RankInfo

SHORT = ("--epochs=1", "--batch-size=64")


def test_every_start_of_the_ranks_records_a_preflight(start: Starter) -> None:
    run = start.complete(*SHORT, world_size=3).run_dir
    [event] = events(run, "preflight")
    assert event["world_size"] == 3
    assert event["allreduce_gb_per_second"] > 0
    assert 0 <= event["seconds"] <= events(run, "train_started")[0]["seconds"]
    assert event["time"] <= events(run, "train_started")[0]["time"]
    [software] = events(run, "software")
    assert software["torch"] == importlib.metadata.version("torch")
    assert software["python"] == platform.python_version()


def test_a_device_that_computes_wrongly_is_found(group: ProcessGroup) -> None:
    message = r"rank 0 on .+ \(CPU\) computes wrongly: 1 of 65536 elements of a matrix product are wrong"
    with pytest.raises(BadNodeError, match=message) as raised:
        run_preflight(group, parse_fault("preflight@0:0"))
    assert raised.value.exit_code == EXIT_BAD_NODE


@pytest.mark.parametrize(
    ("side", "dtype", "periods"),
    [(128, torch.bfloat16, (5, 3)), (128, torch.float16, (5, 3)), (127, torch.bfloat16, (5, 3)),
     (256, torch.float32, (17, 13))],
)  # fmt: skip
def test_one_wrong_element_of_a_product_is_found(side: int, dtype: torch.dtype, periods: tuple[int, int]) -> None:
    assert count_wrong(torch.device("cpu"), side, dtype, periods) == 0
    assert count_wrong(torch.device("cpu"), side, dtype, periods, falsify=True) == 1


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be reported later",
        "NCCL error in: /x/ProcessGroupNCCL.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    ],
)
def test_a_device_that_fails_before_the_training_marks_its_node_as_bad(message: str) -> None:
    with pytest.raises(BadNodeError, match="cannot use its GPUs: ") as raised, device_of_the_node():
        raise RuntimeError(message)
    assert str(raised.value).endswith(message.splitlines()[0])


@pytest.mark.parametrize(
    "message",
    ["NCCL error: remote process exited or there was a network error", "NCCL error: unhandled system error", "no luck"],
)
def test_other_errors_before_the_training_stay_what_they_are(message: str) -> None:
    with pytest.raises(RuntimeError, match=message), device_of_the_node():
        raise RuntimeError(message)


def test_the_exit_code_identifies_the_rank_on_a_bad_node(start: Starter) -> None:
    training = start(*SHORT, "--fault=preflight@0:1", world_size=3)
    assert training.wait() == [TorchrelayError.exit_code, EXIT_BAD_NODE, TorchrelayError.exit_code]
    output = training.output()
    assert output.count("error: this rank passed the check, but another rank failed: rank 1 on ") == 2
    assert output.count("error: rank 1 on ") == 1
    assert "Traceback" not in output
    assert not training.run_dir.exists(), "a bad node leaves nothing behind"


def choose(usable: list[int], problems: list[str], per_node: int = 1) -> list[str]:
    """Return the device of each rank, or its error; `per_node` ranks are on a node."""
    store = HashStore()

    def one(rank: int) -> str:
        rank_info = RankInfo(
            rank=rank, world_size=len(usable), local_rank=rank % per_node, local_world_size=per_node, restarts=0
        )  # fmt: skip
        try:
            return str(choose_device(rank_info, store, usable[rank], problems[rank]))
        except TorchrelayError as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(usable)) as pool:
        return list(pool.map(one, range(len(usable))))


def test_all_ranks_have_gpus_or_none_has() -> None:
    assert choose([1, 4], ["", ""]) == ["cuda:0", "cuda:0"]
    assert choose([0, 0], ["", ""]) == ["cpu", "cpu"]


def test_a_node_whose_driver_is_not_loaded_is_bad() -> None:
    well, bad_node = choose([1, 0], ["", ""])
    assert well == "TorchrelayError: this rank passed the check, but 1 of the 2 ranks have no GPU"
    assert bad_node.startswith("BadNodeError: local rank 0 on ")
    assert "has no GPU: this node has 0" in bad_node


def test_same_number_of_gpus_on_all_nodes_is_a_bad_request() -> None:
    answers = choose([2] * 6, [""] * 6, per_node=3)
    assert all(
        answer.startswith("UserError: 3 ranks per node, but each node gives them 2 GPUs: use") for answer in answers
    )
    answers = choose([2] * 3, [""] * 3, per_node=3)
    assert answers[2].startswith("BadNodeError: local rank 2 on "), "a node may have lost a GPU"
    answers = choose([2] * 3 + [3] * 3, [""] * 6, per_node=3)
    assert answers[2].startswith("BadNodeError: local rank 2 on ")


def test_a_node_whose_gpus_cannot_be_used_is_bad() -> None:
    first, second = choose([0, 0], ["no driver", ""])
    assert re.fullmatch("BadNodeError: local rank 0 on .* cannot use the GPU that was asked for .*: no driver", first)
    assert second.startswith("TorchrelayError: this rank passed")


def test_more_ranks_than_instances_of_mig_are_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1f,MIG-2e")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    second = RankInfo(rank=1, world_size=2, local_rank=1, local_world_size=2, restarts=0)
    with pytest.raises(UserError, match=r"CUDA_VISIBLE_DEVICES is MIG-1f,MIG-2e, .* one rank per node"):
        find_device(second, HashStore())


def as_a_program(run_dir: Path, attempt: str, **environment: str) -> None:
    """In a rank: be the preflight, and nothing else."""
    os.environ |= environment
    sys.exit(preflight.main(str(run_dir), attempt))


def test_rank_that_must_use_a_gpu_finds_its_node_bad(start: Starter) -> None:
    run = start.directory / "run"
    ranks = start(prepare=partial(as_a_program, run, "1", TORCHRELAY_DEVICE="cuda", CUDA_VISIBLE_DEVICES=""))
    assert ranks.wait() == [EXIT_BAD_NODE]
    assert re.search("(?m)^error: local rank 0 on .* cannot use the GPU that was asked for .*: ", ranks.output())
    assert not run.exists()


def test_the_preflight_is_a_program_of_its_own(start: Starter) -> None:
    run = start.directory / "run"
    run.mkdir()
    ranks = start(world_size=2, prepare=partial(as_a_program, run, "3"))
    assert ranks.wait() == [0, 0], ranks.output()
    assert "\npreflight: 2 ranks on CPU, all-reduce " in f"\n{ranks.output()}"
    [event] = events(run, "preflight")
    assert (event["attempt"], event["world_size"], event["device"]) == (3, 2, "CPU")
    assert assert_typed(RunDir(run).events) == {"preflight", "software"}
