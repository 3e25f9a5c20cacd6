"""Draws the tables of `hpc smoke`, for the screen and for the administrators. Pure; runs on the login node."""

import time
from collections.abc import Sequence
from statistics import median_high, median_low

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hpc.base.text import visible
from hpc.cluster.smoke.judgement import Change, Slowness
from hpc.cluster.smoke.measurements import SmokeResult

_MOST_PAIRS = 10


def show(console: Console, result: SmokeResult, slow: Sequence[Slowness], changed: Sequence[Change]) -> None:
    """Print the nodes, the network, and slow or changed parts."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(result.time))
    nodes = "1 node" if len(result.nodes) == 1 else f"{len(result.nodes)} nodes"
    console.print(f"[bold]{nodes} of partition {escape(visible(result.partition))}, {when}[/]\n")
    for table in (_nodes(result), _all_reduce(result), _pairs(result)):
        if table.row_count:
            console.print(table, "")
    _sentences(console, "slow or wrong", [f"{one.where}: {one.what}" for one in slow])
    _sentences(console, "changed", [f"{one.where}: {one.what}: {one.before} -> {one.now}" for one in changed])


def _sentences(console: Console, title: str, sentences: Sequence[str]) -> None:
    if sentences:
        console.print(f"[bold]{title}[/]", *(f"  {escape(visible(sentence))}" for sentence in sentences), "", sep="\n")


def _table(*columns: str, left: int = 1) -> Table:
    """Return an empty table. The first `left` columns are aligned left for words, the others right for numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", overflow="fold")
    return table


def _nodes(result: SmokeResult) -> Table:
    table = _table(
        "node", "CPU", "device", "disk", "cores", "memory", "TFLOP/s", "free", "writes", "stages", "clock", left=4
    )
    for node in result.nodes:
        own = [rank for rank in result.ranks if rank.node == node.name]
        devices = ", ".join(dict.fromkeys([rank.device for rank in own] or node.gpus)) or "-"
        driver = f" (driver {node.driver})" if node.driver else ""
        device = f"{len(own)} x {devices}{driver}" if own else devices
        speeds = [rank.teraflops for rank in own]
        table.add_row(
            *(escape(visible(text)) for text in (node.name, node.cpu, device)),
            node.stage_type or "-",
            str(node.cpus),
            _giga(node.memory_bytes),
            "-" if not speeds else f"{min(speeds):.3g}" + (f" to {max(speeds):.3g}" if len(speeds) > 1 else ""),
            _giga(node.stage_free_bytes),
            _giga(node.write_bytes_per_second, "/s"),
            _giga(node.staged_bytes_per_second, "/s"),
            "-" if node.clock_seconds is None else f"{node.clock_seconds * 1e3:+.0f} ms",
        )
    return table


def _giga(value: float | None, per: str = "") -> str:
    return "-" if value is None else f"{value / 1e9:.3g} GB{per}"


def _all_reduce(result: SmokeResult) -> Table:
    table = _table("all-reduce of", "time", "bus bandwidth")
    for one in result.all_reduce:
        table.add_row(_size(one.message_bytes), f"{one.seconds * 1e3:.3g} ms", f"{one.gb_per_second:.3g} GB/s")
    return table


def _size(value: int) -> str:
    return f"{value / 2**20:.0f} MiB" if value >= 2**20 else f"{value / 2**10:.0f} KiB"


def _pairs(result: SmokeResult) -> Table:
    """Return a table of the pairs with the lowest bandwidth and, if there are several pairs, of the median."""
    table = _table("nodes", "latency", "bandwidth")
    slowest = sorted(result.pairs, key=lambda pair: pair.gb_per_second)
    for pair in slowest[:_MOST_PAIRS]:
        _add_pair(table, escape(visible(pair.where)), pair.latency_seconds, pair.gb_per_second)
    if len(slowest) > 1:
        latency = median_low(pair.latency_seconds for pair in slowest)
        rate = median_high(pair.gb_per_second for pair in slowest)
        _add_pair(table, f"median of {len(slowest)} pairs", latency, rate)
    return table


def _add_pair(table: Table, name: str, latency: float, bandwidth: float) -> None:
    table.add_row(name, f"{latency * 1e6:.0f} us", f"{bandwidth:.3g} GB/s")
