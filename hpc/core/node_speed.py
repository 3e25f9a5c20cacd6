"""What `hpc smoke` knows of one node: what it has, and how fast its disk is. Runs everywhere; no torch.

`jobs.smoke_node` measures it, `hpc.smoke` judges and shows it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class NodeSpeed:
    """One node."""

    name: str
    cpu: str
    """Its model."""
    cpus: int
    """Of the machine."""
    memory_bytes: int
    kernel: str
    gpus: tuple[str, ...]
    """The models that the driver lists for the job."""
    driver: str | None
    """NVIDIA's version; None: there is none."""
    stage_dir: str
    stage_type: str | None
    """Type of its file system; None if unknown."""
    stage_free_bytes: int | None
    write_bytes_per_second: float | None
    """To the disk of `stage_dir`, with fsync; None: it has no room."""
    staged_bytes_per_second: float | None
    """From shared storage and other nodes to that disk, as a run stages its data, with all nodes at once; None: not."""
    staging_problem: str
    """Why nothing was staged; empty if it was."""
    clock_seconds: float | None
    """This node's clock minus that of the first one; None: they did not meet."""
    problem: str
    """Why the ranks of this node were not measured; empty if they were."""
    ranks: Mapping[str, Any] | None
    """On the first node what the ranks have measured (`training.engine.rank_benchmark`); None on the others."""


def node_speed(document: Mapping[str, Any]) -> NodeSpeed:
    """The node whose `asdict` was written as JSON."""
    return NodeSpeed(**{**document, "gpus": tuple(document["gpus"])})
