"""Finds what is wrong, slow compared with the median, or changed since the previous `hpc smoke`. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median_high, median_low
from typing import Any

from hpc.base.node_info import AllReduceSpeed, NodeInfo, PairSpeed, RankSpeed
from hpc.cluster.smoke.measurements import SmokeResult

# A rate below this part of the median is slow. GPUs of one kind differ by a few percent; CPUs, disks and networks,
# which are measured on all nodes at the same time, differ more.
_SLOW_GPU, _SLOW_COPY, _SLOW_OTHER = 0.9, 0.7, 0.5
# A latency is slow above this multiple of the median and above a millisecond: good latencies are microseconds.
_SLOW_LATENCY, _LEAST_LATENCY_SECONDS = 5.0, 0.001
_CLOCK_SECONDS = 1.0
# A rate has changed if it rose or fell by more than a factor of 1 + _CHANGED.
_CHANGED = 0.5
# The rates of a node: the field, the words for a slow rate, and the words for a changed rate.
_NODE_RATES = (
    ("write_bytes_per_second", "its disk writes", "disk writes"),
    ("staged_bytes_per_second", "it stages data at", "stages"),
)
_PARTS = ("cpu", "cpus", "memory_bytes", "kernel", "gpus", "driver", "stage_type")

_Speed = RankSpeed | AllReduceSpeed | PairSpeed


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """A slow, wrong or missing part."""

    where: str
    """The name of a node, of a GPU of a node, or of a pair of nodes."""
    what: str
    """A sentence with the measured value and the median."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A difference from the last `hpc smoke`."""

    where: str
    what: str
    before: str
    now: str


def judge(result: SmokeResult) -> list[Slowness]:
    """Return everything that is slow, wrong or missing, nodes first."""
    return [*_nodes(result), *_ranks(result), *_pairs(result)]


def _nodes(result: SmokeResult) -> list[Slowness]:
    found = list[Slowness]()
    if len(result.nodes) < result.asked_nodes:
        answered = f"{len(result.nodes)} of {result.asked_nodes} nodes answered"
        found.append(Slowness(where=f"partition {result.partition}", what=f"{answered}: see the messages of srun"))
    for node in result.nodes:
        clock = node.clock_seconds or 0.0
        problems = (
            node.problem,
            f"it did not stage data: {node.staging_problem}" if node.staging_problem else "",
            f"its clock is {clock:+.1f} s off the first node's" if abs(clock) > _CLOCK_SECONDS else "",
        )
        found += [Slowness(where=node.name, what=problem) for problem in problems if problem]
    for field, what, _ in _NODE_RATES:
        found += _slower(_node_rates(result.nodes, field), _SLOW_OTHER, what, "GB/s")
    return found


def _node_rates(nodes: Iterable[NodeInfo], field: str) -> dict[str, float]:
    """Return the rates of nodes in GB/s, by name. Nodes without a rate are left out."""
    return {node.name: rate / 1e9 for node in nodes if (rate := getattr(node, field))}


def _ranks(result: SmokeResult) -> list[Slowness]:
    found = list[Slowness]()
    for device in dict.fromkeys(rank.device for rank in result.ranks):
        alike = [rank for rank in result.ranks if rank.device == device]
        computes = {rank.where: rank.teraflops for rank in alike}
        copies = {rank.where: rate for rank in alike if (rate := rank.host_to_device_gb_per_second) is not None}
        found += _slower(computes, _SLOW_OTHER if device == "CPU" else _SLOW_GPU, "it computes", "TFLOP/s")
        found += _slower(copies, _SLOW_COPY, "it gets data from the host at", "GB/s")
    return found


def _pairs(result: SmokeResult) -> list[Slowness]:
    """Return slow pairs. A node that is slow with every other node is named instead of its pairs."""
    rates = {pair.where: pair.gb_per_second for pair in result.pairs}
    slow = {one.where: one for one in _slower(rates, _SLOW_OTHER, "it sends", "GB/s")}
    if len(result.pairs) > 1:
        usual = median_low([pair.latency_seconds for pair in result.pairs])
        most = max(_SLOW_LATENCY * usual, _LEAST_LATENCY_SECONDS)
        for pair in result.pairs:
            if pair.latency_seconds > most and pair.where not in slow:
                what = f"its latency is {pair.latency_seconds * 1e3:.2g} ms, more than {most * 1e3:.2g} ms"
                slow[pair.where] = Slowness(where=pair.where, what=what)
    found = list[Slowness]()
    for node in dict.fromkeys(node for pair in result.pairs for node in pair.nodes):
        own = [pair.where for pair in result.pairs if node in pair.nodes]
        if len(own) > 1 and slow.keys() >= set(own):
            found.append(Slowness(where=node, what=f"with every other node {slow[own[0]].what}"))
            slow = {where: one for where, one in slow.items() if where not in own}
    return [*found, *slow.values()]


def _slower(rates: Mapping[str, float], part: float, what: str, unit: str) -> list[Slowness]:
    """Return a Slowness for each rate below `part` times the median. Of two middle rates, the higher is the median."""
    if len(rates) < 2:
        return []
    usual = median_high(rates.values())
    return [
        Slowness(where=where, what=f"{what} {rate:.3g} {unit}, the median is {usual:.3g}")
        for where, rate in rates.items()
        if rate < part * usual
    ]


def changes(before: SmokeResult, now: SmokeResult) -> list[Change]:
    """Return the changes of the nodes' hardware, and of the rates that both results have."""
    old = {node.name: node for node in before.nodes}
    found = [change for node in now.nodes if node.name in old for change in _node_changes(old[node.name], node)]
    found += _rate_changes(before.pairs, now.pairs, "gb_per_second", "sends", "GB/s")
    found += _rate_changes(before.pairs, now.pairs, "latency_seconds", "latency", "s")
    found += _rate_changes(before.ranks, now.ranks, "teraflops", "computes", "TFLOP/s")
    if before.asked_nodes == now.asked_nodes:
        found += _rate_changes(before.all_reduce, now.all_reduce, "gb_per_second", "moves", "GB/s")
    return found


def _node_changes(before: NodeInfo, now: NodeInfo) -> list[Change]:
    """Return the changes of a node's hardware, kernel and rates."""
    parts = {part: (getattr(before, part), getattr(now, part)) for part in _PARTS}
    found = [
        Change(where=now.name, what=part.replace("_", " "), before=_words(old), now=_words(new))
        for part, (old, new) in parts.items()
        if old != new
    ]
    for field, _, what in _NODE_RATES:
        found += _changed(_node_rates([before], field), _node_rates([now], field), what, "GB/s")
    return found


def _words(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) and value else str(value or "none")


def _rate_changes(before: Iterable[_Speed], now: Iterable[_Speed], field: str, what: str, unit: str) -> list[Change]:
    old, new = ({one.where: getattr(one, field) for one in rows} for rows in (before, now))
    return _changed(old, new, what, unit)


def _changed(before: Mapping[str, float], now: Mapping[str, float], what: str, unit: str) -> list[Change]:
    return [
        Change(where=where, what=what, before=f"{before[where]:.3g} {unit}", now=f"{rate:.3g} {unit}")
        for where, rate in now.items()
        if before.get(where) and rate and max(before[where] / rate, rate / before[where]) > 1 + _CHANGED
    ]
