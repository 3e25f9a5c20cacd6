"""What is slow or wrong in a `hpc smoke`, against the median, and what has changed since the last one. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median_high, median_low
from typing import Any

from hpc.core.node_info import NodeSpeed
from hpc.smoke.measurements import SmokeResult

# Parts of the median below which something is slow. GPUs of one kind differ by a few percent; what nodes do with their
# CPUs, disks and networks at the same time differs more.
_SLOW_GPU, _SLOW_COPY, _SLOW_OTHER = 0.9, 0.7, 0.5
# Of two latencies, of which the better ones are microseconds.
_SLOW_LATENCY, _LEAST_LATENCY_SECONDS = 5.0, 0.001
_CLOCK_SECONDS = 1.0
# A rate that has changed by less than this is the same.
_CHANGED = 0.5


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """Something that is slow, wrong or missing."""

    where: str
    """A node, a GPU of a node, or a pair of nodes."""
    what: str
    """In words, with what was measured and the median."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something that was otherwise in the last `hpc smoke`."""

    where: str
    what: str
    before: str
    now: str


def judge(result: SmokeResult) -> list[Slowness]:
    """All that is slow, wrong or missing, the nodes first."""
    return [*_nodes(result), *_ranks(result), *_pairs(result)]


def _nodes(result: SmokeResult) -> list[Slowness]:
    found = list[Slowness]()
    if len(result.nodes) < result.asked_nodes:
        answered = f"{len(result.nodes)} of {result.asked_nodes} nodes answered"
        found.append(Slowness(where=f"partition {result.partition}", what=f"{answered}: see the messages of srun"))
    for node in result.nodes:
        if node.problem:
            found.append(Slowness(where=node.name, what=node.problem))
        if node.staging_problem:
            found.append(Slowness(where=node.name, what=f"it did not stage data: {node.staging_problem}"))
        if abs(node.clock_seconds or 0.0) > _CLOCK_SECONDS:
            found.append(
                Slowness(where=node.name, what=f"its clock is {node.clock_seconds:+.1f} s off the first node's")
            )
    for field, what in (
        ("write_bytes_per_second", "its disk writes"),
        ("staged_bytes_per_second", "it stages data at"),
    ):
        rates = {node.name: getattr(node, field) / 1e9 for node in result.nodes if getattr(node, field)}
        found += _slower(rates, _SLOW_OTHER, what, "GB/s")
    return found


def _ranks(result: SmokeResult) -> list[Slowness]:
    found = list[Slowness]()
    for device in dict.fromkeys(rank["device"] for rank in result.ranks):
        alike = [rank for rank in result.ranks if rank["device"] == device]
        computed = {rank_name(rank): rank["teraflops"] for rank in alike}
        copied = {
            rank_name(rank): rank["host_to_device_gb_per_second"]
            for rank in alike
            if rank["host_to_device_gb_per_second"] is not None
        }
        found += _slower(computed, _SLOW_OTHER if device == "CPU" else _SLOW_GPU, "it computes", "TFLOP/s")
        found += _slower(copied, _SLOW_COPY, "it gets data from the host at", "GB/s")
    return found


def rank_name(rank: Mapping[str, Any]) -> str:
    """`gpu01`, or of a rank with a GPU `gpu01 GPU 3`."""
    return str(rank["node"]) if rank["device"] == "CPU" else f"{rank['node']} GPU {rank['local_rank']}"


def pair_name(pair: Mapping[str, Any]) -> str:
    """`gpu01 - gpu02`."""
    return " - ".join(pair["nodes"])


def _pairs(result: SmokeResult) -> list[Slowness]:
    """Slow pairs; a node that is slow with every other one is named instead of its pairs."""
    rates = {pair_name(pair): pair["gb_per_second"] for pair in result.pairs}
    slow = {one.where: one for one in _slower(rates, _SLOW_OTHER, "it sends", "GB/s")}
    usual = max(
        _SLOW_LATENCY * median_low([pair["latency_seconds"] for pair in result.pairs] or [0.0]), _LEAST_LATENCY_SECONDS
    )
    for pair in result.pairs if len(result.pairs) > 1 else ():
        if pair["latency_seconds"] > usual and pair_name(pair) not in slow:
            what = f"its latency is {pair['latency_seconds'] * 1e3:.2g} ms, more than {usual * 1e3:.2g} ms"
            slow[pair_name(pair)] = Slowness(where=pair_name(pair), what=what)
    found = list[Slowness]()
    for node in dict.fromkeys(node for pair in result.pairs for node in pair["nodes"]):
        own = [pair_name(pair) for pair in result.pairs if node in pair["nodes"]]
        if len(own) > 1 and slow.keys() >= set(own):
            found.append(Slowness(where=node, what=f"with every other node {slow[own[0]].what}"))
            slow = {where: one for where, one in slow.items() if where not in own}
    return [*found, *slow.values()]


def _slower(rates: Mapping[str, float], part: float, what: str, unit: str) -> list[Slowness]:
    """Those below a part of the median. Of an even number the better one of the two in the middle counts."""
    if len(rates) < 2:
        return []
    usual = median_high(rates.values())
    return [
        Slowness(where=where, what=f"{what} {rate:.3g} {unit}, the median is {usual:.3g}")
        for where, rate in rates.items()
        if rate < part * usual
    ]


def changes(before: SmokeResult, now: SmokeResult) -> list[Change]:
    """What is otherwise than before, of nodes and pairs that both have measured; and nodes with other parts."""
    old = {node.name: node for node in before.nodes}
    found = [change for node in now.nodes if node.name in old for change in _node_changes(old[node.name], node)]
    for name, what, unit in (("gb_per_second", "sends", "GB/s"), ("latency_seconds", "latency", "s")):
        found += _rate_changes(_by(before.pairs, pair_name, name), _by(now.pairs, pair_name, name), what, unit)
    found += _rate_changes(
        _by(before.ranks, rank_name, "teraflops"), _by(now.ranks, rank_name, "teraflops"), "computes", "TFLOP/s"
    )
    if before.asked_nodes == now.asked_nodes:
        found += _rate_changes(
            _by(before.all_reduce, _size, "gb_per_second"), _by(now.all_reduce, _size, "gb_per_second"), "moves", "GB/s"
        )
    return found


def _by(rows: Iterable[Mapping[str, Any]], name: Any, field: str) -> dict[str, float]:
    return {name(row): row[field] for row in rows}


def _size(row: Mapping[str, Any]) -> str:
    return f"all-reduce of {row['message_bytes']:,} bytes"


def _node_changes(before: NodeSpeed, now: NodeSpeed) -> list[Change]:
    """Parts that were replaced, and rates."""
    found = []
    for field in ("cpu", "cpus", "memory_bytes", "kernel", "gpus", "driver", "stage_type"):
        old, new = getattr(before, field), getattr(now, field)
        if old != new:
            found.append(Change(where=now.name, what=field.replace("_", " "), before=_words(old), now=_words(new)))
    for field, what in (("write_bytes_per_second", "disk writes"), ("staged_bytes_per_second", "stages")):
        old, new = getattr(before, field), getattr(now, field)
        if old and new:
            found += _rate_changes({now.name: old / 1e9}, {now.name: new / 1e9}, what, "GB/s")
    return found


def _words(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) and value else str(value or "none")


def _rate_changes(before: Mapping[str, float], now: Mapping[str, float], what: str, unit: str) -> list[Change]:
    return [
        Change(where=where, what=what, before=f"{before[where]:.3g} {unit}", now=f"{rate:.3g} {unit}")
        for where, rate in now.items()
        if before.get(where) and rate and max(before[where] / rate, rate / before[where]) > 1 + _CHANGED
    ]
