"""The check before a training: what it says of ranks that are well, and of one whose device computes wrongly."""

import os
import subprocess
import sys

import pytest
from trainer_rig import Starter, events

from hpc.errors import TorchrelayError
from hpc.outcome import EXIT_BAD_NODE
from training.distributed import Ranks, UnfitNodeError
from training.fault import parse_fault
from training.preflight import check

SHORT = ("--epochs=1", "--batch-size=64")


def test_every_start_of_the_ranks_is_preceded_by_a_check_that_is_recorded(start: Starter) -> None:
    run = start.complete(*SHORT, world_size=3).run_dir
    [preflight] = events(run, "preflight")
    assert preflight["world_size"] == 3
    assert preflight["allreduce_gb_per_second"] > 0
    assert 0 <= preflight["seconds"] <= events(run, "train_started")[0]["seconds"]
    assert preflight["time"] <= events(run, "train_started")[0]["time"]


def test_a_rank_alone_has_no_bandwidth(ranks: Ranks) -> None:
    report = check(ranks)
    assert (report.world_size, report.allreduce_gb_per_second) == (1, None)


def test_a_device_that_computes_wrongly_is_found_out(ranks: Ranks) -> None:
    message = r"rank 0 on .+ \(the CPU\) computes wrongly: 1 of 65536 elements of a matrix product are not right"
    with pytest.raises(UnfitNodeError, match=message) as raised:
        check(ranks, parse_fault("preflight@0:0"))
    assert raised.value.exit_code == EXIT_BAD_NODE


def test_the_unfit_rank_is_told_from_the_others_by_its_exit_code(start: Starter) -> None:
    training = start(*SHORT, "--fault=preflight@0:1", world_size=3)
    assert training.wait() == [TorchrelayError.exit_code, EXIT_BAD_NODE, TorchrelayError.exit_code]
    output = training.output()
    assert output.count("error: this rank is well, but rank 1 on ") == 2
    assert output.count("error: rank 1 on ") == 1
    assert "Traceback" not in output
    assert not training.run_dir.exists(), "an unfit node leaves nothing behind"


def test_a_complete_run_needs_no_check(start: Starter) -> None:
    run = start.complete(*SHORT).run_dir
    assert start(*SHORT, "--fault=preflight@0:0").wait() == [0]
    assert len(events(run, "preflight")) == 1


def test_the_check_is_a_program_of_its_own() -> None:
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    argv += ["--rdzv-endpoint=localhost:0", "-m", "training.preflight"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    [line] = done.stdout.splitlines()
    assert line.startswith("preflight: 2 ranks on cpu, all-reduce ")
