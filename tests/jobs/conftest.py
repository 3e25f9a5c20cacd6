"""A node of an attempt, without its agent."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.events import script_spec

from hpc.core.attempts import Attempt
from hpc.core.ledger import EventWriter
from hpc.core.nodedir import HeldNodeDir
from hpc.core.rundir import RunDir
from jobs.node_attempt import NodeAllocation, NodeAttempt


@pytest.fixture
def node(tmp_path: Path) -> NodeAttempt:
    return NodeAttempt(
        run=RunDir(tmp_path),
        spec=script_spec(),
        allocation=NodeAllocation(
            cluster="slurm", job_id="7", restart=0, node_rank=0, hostnames=("gpu01",), cpus=1
        ),
        attempt=Attempt(attempt=1, job_id="7", restart=0, secret="n", port=1, nodes=("gpu01",), started=1.0),
        writer=EventWriter(tmp_path / "events" / "node.jsonl"),
    )  # fmt: skip


@pytest.fixture
def held(node: NodeAttempt) -> Iterator[HeldNodeDir]:
    made = HeldNodeDir(node.run.path, 0)
    yield made
    made.close(remove=True)
