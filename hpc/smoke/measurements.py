"""What one `hpc smoke` has measured, as it is kept beside the runs, and the one before it. Runs on the login node."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpc.core.files import write_json
from hpc.core.node_info import NodeSpeed, node_speed

_PREFIX = "smoke-"


@dataclass(frozen=True, kw_only=True)
class SmokeResult:
    """One `hpc smoke`. Rates are in GB/s, times in seconds."""

    time: float
    """Its end, in seconds since the epoch."""
    partition: str
    asked_nodes: int
    nodes: tuple[NodeSpeed, ...]
    """Those that answered, without `ranks`."""
    ranks: tuple[Mapping[str, Any], ...]
    """Of each rank its `rank`, `local_rank`, `node`, `device`, `teraflops`, `host_to_device_gb_per_second`."""
    all_reduce: tuple[Mapping[str, Any], ...]
    """Of all ranks: `message_bytes`, `seconds`, `gb_per_second`."""
    pairs: tuple[Mapping[str, Any], ...]
    """Of each pair of nodes `nodes`, `latency_seconds`, `gb_per_second`."""


def result_of(nodes: Sequence[NodeSpeed], partition: str, asked_nodes: int) -> SmokeResult:
    """The nodes that have answered, with what their ranks have measured together."""
    measured = next((node.ranks for node in nodes if node.ranks), {})
    return SmokeResult(
        time=round(time.time(), 1),
        partition=partition,
        asked_nodes=asked_nodes,
        nodes=tuple(replace(node, ranks=None) for node in nodes),
        **{name: tuple(measured.get(name, ())) for name in ("ranks", "all_reduce", "pairs")},
    )


def document_of(result: SmokeResult) -> dict[str, Any]:
    """The result as JSON."""
    nodes = [{name: value for name, value in asdict(node).items() if name != "ranks"} for node in result.nodes]
    return {**asdict(result), "nodes": nodes}


def keep(result: SmokeResult, runs_dir: Path) -> Path:
    """Write the result beside the runs. Returns its file, `smoke-20261123-150000.json`."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(result.time))
    path = runs_dir / f"{_PREFIX}{stamp}.json"
    runs_dir.mkdir(parents=True, exist_ok=True)
    write_json(path, document_of(result))
    return path


def newest(runs_dir: Path) -> SmokeResult | None:
    """The last result that is kept beside the runs; None if there is none that can be read."""
    for path in sorted(runs_dir.glob(f"{_PREFIX}*.json"), reverse=True):
        with suppress(OSError, ValueError, KeyError, TypeError):  # damaged, or of another version
            return read(path)
    return None


def read(path: Path) -> SmokeResult:
    """A kept result. Raises OSError, ValueError, KeyError or TypeError if it is none."""
    fields = json.loads(path.read_bytes())
    nodes = tuple(node_speed({**node, "ranks": None}) for node in fields["nodes"])
    lists = {name: tuple(fields[name]) for name in ("ranks", "all_reduce", "pairs")}
    return SmokeResult(**{**fields, **lists, "nodes": nodes})
