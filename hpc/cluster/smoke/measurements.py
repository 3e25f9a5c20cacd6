"""Keeps the results of `hpc smoke` in the runs directory, and reads the newest one. Runs on the login node."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc.base.files import write_json
from hpc.base.node_info import AllReduceSpeed, NodeInfo, PairSpeed, RankSpeed, node_from_json

_PREFIX = "smoke-"
# The fields of a NodeInfo that are kept and printed as JSON. The other fields are for the checks of hpc doctor.
KEPT = (
    "name", "cpu", "cpus", "memory_bytes", "kernel", "gpus", "driver", "stage_dir", "stage_type", "stage_free_bytes",
    "write_bytes_per_second", "staged_bytes_per_second", "staging_problem", "clock_seconds", "problem",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SmokeResult:
    """The result of one `hpc smoke`. Times are in seconds since the epoch."""

    time: float
    """Time at which the test ended."""
    partition: str
    asked_nodes: int
    nodes: tuple[NodeInfo, ...]
    """Nodes that answered."""
    ranks: tuple[RankSpeed, ...]
    all_reduce: tuple[AllReduceSpeed, ...]
    pairs: tuple[PairSpeed, ...]


def result_of(nodes: Sequence[NodeInfo], partition: str, asked_nodes: int) -> SmokeResult:
    """Return the result of the nodes that have answered. The first node also reports the measurements of all ranks."""
    measured = next((node.ranks for node in nodes if node.ranks), {"ranks": (), "all_reduce": (), "pairs": ()})
    return SmokeResult(
        time=round(time.time(), 1),
        partition=partition,
        asked_nodes=asked_nodes,
        nodes=tuple(nodes),
        **_speeds(measured),
    )


def _speeds(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "ranks": tuple(RankSpeed(**row) for row in fields["ranks"]),
        "all_reduce": tuple(AllReduceSpeed(**row) for row in fields["all_reduce"]),
        "pairs": tuple(PairSpeed(**{**row, "nodes": tuple(row["nodes"])}) for row in fields["pairs"]),
    }


def document_of(result: SmokeResult) -> dict[str, Any]:
    """Return the JSON document of a result."""
    nodes = [{name: getattr(node, name) for name in KEPT} for node in result.nodes]
    return {**asdict(result), "nodes": nodes}


def keep(result: SmokeResult, runs_dir: Path) -> Path:
    """Write the result into the runs directory, and return the path, such as `runs/smoke-20261123-150000.json`."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(result.time))
    path = runs_dir / f"{_PREFIX}{stamp}.json"
    runs_dir.mkdir(parents=True, exist_ok=True)
    write_json(path, document_of(result))
    return path


def newest(runs_dir: Path) -> SmokeResult | None:
    """Return the newest readable result in the runs directory; None if there is none."""
    for path in sorted(runs_dir.glob(f"{_PREFIX}*.json"), reverse=True):
        with suppress(OSError, ValueError, KeyError, TypeError):  # damaged, or of another version
            fields = json.loads(path.read_bytes())
            nodes = tuple(map(node_from_json, fields["nodes"]))
            return SmokeResult(**{**fields, "nodes": nodes, **_speeds(fields)})
    return None
