"""A node's report in `hpc doctor --nodes`."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.environments import make_torch_venv

from hpc.base.errors import TorchrelayError
from hpc.run.rundir import RunDir
from hpc.run.spec import Network
from jobs import node_probe
from jobs.node_attempt import NodeAllocation
from jobs.node_probe import Probe, meet, result_of, run_ranks, write_speed


def test_speed_of_a_disk_leaves_nothing_on_it(tmp_path: Path) -> None:
    speed = write_speed(tmp_path)
    assert speed is not None
    assert speed > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "exit_code", "fields"),
    [
        ('a warning\nbenchmark: {"device": "CPU"}\n', 0, {"device": "CPU"}),
        (
            "error: this rank passed the check, but x\nerror: rank 1 computes wrongly\nnoise\n",
            1,
            {"problem": "rank 1 computes wrongly"},
        ),
        ("Traceback\nRuntimeError: no route\n\n", 1, {"problem": "RuntimeError: no route"}),
        (
            "waiting\n",
            124,
            {"problem": "no answer in 180 s: the nodes do not reach each other, or something hangs"},
        ),
    ],
)
def test_result_of_what_ranks_printed(output: str, exit_code: int, fields: dict[str, str]) -> None:
    assert result_of(output, exit_code) == fields


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as resources:
        yield resources


def node(directory: Path, node_rank: int) -> Probe:
    """Return one of two nodes; the first node's name leads to this machine."""
    allocation = NodeAllocation(
        cluster="slurm", job_id="7", restart=0, node_rank=node_rank, hostnames=("localhost", "gpu02"), cpus=None
    )
    return Probe(run=RunDir(directory), num_gpus=0, network=Network(), allocation=allocation)


def test_nodes_that_do_not_meet_name_who_is_missing(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_probe, "_MEET_SECONDS", 0.3)
    with pytest.raises(TorchrelayError, match="localhost wrote nothing to the runs directory"):
        meet(node(tmp_path, 1), stack)
    with pytest.raises(TorchrelayError, match="gpu02 did not reach localhost at "):
        meet(node(tmp_path, 0), stack)


# Its imports are those of the ranks.
WHERE = """
import importlib.util as util, json, sys, training.engine.rank_benchmark
names = [name for name in ("numpy", "rich", "hpc", "torchrelay") if util.find_spec(name)]
print("benchmark:", json.dumps([sys.prefix, *names]))
"""


def test_ranks_run_in_the_python_of_the_script_with_nothing_but_our_packages(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = make_torch_venv(tmp_path / "env")
    (tmp_path / "where.py").write_text(WHERE)
    monkeypatch.setenv("PYTHONPATH", f"ours:ours/too:{tmp_path}")
    probe = node(tmp_path, 0)
    alone = replace(probe.allocation, hostnames=("localhost",))
    probe = replace(probe, allocation=alone, python=f"{environment}/bin/python")
    channel, secret = meet(probe, stack)
    assert run_ranks(probe, channel, secret, "where") == [str(environment), "hpc", "torchrelay"]
