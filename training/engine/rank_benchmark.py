"""Measures the devices of the ranks and the network between them, for `hpc smoke`. Runs on every rank.

`python -m training.engine.rank_benchmark` runs under torchrun, after a preflight. Rank 0 prints one line of JSON. Each
number is the fastest of several tries: a device or link that is slow once may have been disturbed.
"""

import faulthandler
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import distributed

from hpc.base.node_info import AllReduceSpeed, PairSpeed, RankSpeed
from training.engine.preflight import connect_and_check
from training.runtime.process_group import ProcessGroup, disconnect
from training.runtime.rank_device import device_name

# jobs.node_probe finds the result by this prefix.
_PREFIX = "benchmark: "
_TRIES = 3
_PING_PONGS = 20
# Exponents of 2 for message sizes in bytes. 1 KiB shows the latency; 16 or 256 MiB show the bandwidth for gradients.
_EXPONENTS = {"cpu": (10, 13, 16, 20, 24), "cuda": (10, 13, 16, 20, 24, 28)}
# Size of a message that shows the bandwidth even of a fast link. On a gigabit link, 8 MiB take a tenth of a second.
_PAIR_BYTES = {"cpu": 2**23, "cuda": 2**26}
_MATRIX_SIDE = {"cpu": 1024, "cuda": 8192}
_COPY_BYTES = 2**28


def pair_rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of nodes in rounds, by the circle method. No node is in two pairs of a round."""
    # With an odd number of nodes, one of them rests in each round.
    places: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def measure(group: ProcessGroup, node: str) -> dict[str, Any]:
    """Take all measurements, and return them ready for JSON, the same on every rank. All ranks must call this."""
    speeds = group.all_gather_json(asdict(_rank_speed(group, node)))
    return {"ranks": speeds, "all_reduce": _all_reduce(group), "pairs": _pairs(group, [one["node"] for one in speeds])}


def _rank_speed(group: ProcessGroup, node: str) -> RankSpeed:
    device = group.device
    side, dtype = _MATRIX_SIDE[device.type], torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    seconds = _fastest(group, lambda: left @ right)
    copied = None
    if device.type == "cuda":
        host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        copied = _COPY_BYTES / _fastest(group, lambda: host.to(device, non_blocking=True)) / 1e9
    return RankSpeed(
        rank=group.rank,
        local_rank=group.rank_info.local_rank,
        node=node,
        device=device_name(device),
        teraflops=round(2 * side**3 / seconds / 1e12, 3),
        host_to_device_gb_per_second=None if copied is None else round(copied, 2),
    )


def _fastest(group: ProcessGroup, work: Callable[[], object]) -> float:
    """Return the seconds of the fastest try. The first try is a warm-up and does not count. All ranks try together."""
    found = []
    for _ in range(_TRIES + 1):
        distributed.barrier(group=group.control)
        group.wait_for_device()
        began = time.perf_counter()
        work()
        group.wait_for_device()
        found.append(time.perf_counter() - began)
    return min(found[1:])


def _all_reduce(group: ProcessGroup) -> list[dict[str, Any]]:
    if group.world_size == 1:
        return []
    found = []
    for exponent in _EXPONENTS[group.device.type]:
        values = torch.zeros(2**exponent // 4, device=group.device)
        own = _fastest(group, lambda values=values: distributed.all_reduce(values))  # type: ignore[misc]  # bound now
        seconds = max(group.all_gather_json(own))
        bandwidth = 2 * (group.world_size - 1) / group.world_size * values.nbytes / seconds / 1e9
        speed = AllReduceSpeed(
            message_bytes=values.nbytes, seconds=round(seconds, 7), gb_per_second=round(bandwidth, 4)
        )
        found.append(asdict(speed))
    return found


def _pairs(group: ProcessGroup, node_of_rank: list[str]) -> list[dict[str, Any]]:
    """Return the speeds of all pairs of nodes, the same on every rank. The first node of a pair reports for both."""
    per_node = group.rank_info.local_world_size
    own, found = group.rank // per_node, []
    for pairs in pair_rounds(group.world_size // per_node):
        # No pair begins while a pair of the previous round still sends.
        distributed.barrier(group=group.control)
        for first, second in pairs if group.rank_info.local_rank == 0 else ():
            if own in {first, second}:
                other = (second if own == first else first) * per_node
                latency, bandwidth = _ping_pong(group, other, begins=own == first)
                if own == first:
                    nodes = node_of_rank[group.rank], node_of_rank[other]
                    found.append(
                        PairSpeed(nodes=nodes, latency_seconds=round(latency, 7), gb_per_second=round(bandwidth, 4))
                    )
    gathered = group.all_gather_json([asdict(pair) for pair in found])
    return [pair for of_rank in gathered for pair in of_rank]


def _ping_pong(group: ProcessGroup, other: int, *, begins: bool) -> tuple[float, float]:
    """Return the seconds of a small message to another rank (one way), and the GB/s of a large one."""
    small = torch.zeros(1, device=group.device)
    large = torch.zeros(_PAIR_BYTES[group.device.type] // 4, device=group.device)
    latency = min(_there_and_back(group, small, other, begins=begins) for _ in range(_PING_PONGS)) / 2
    seconds = min(_there_and_back(group, large, other, begins=begins) for _ in range(_TRIES)) / 2
    return latency, large.nbytes / seconds / 1e9


def _there_and_back(group: ProcessGroup, message: torch.Tensor, other: int, *, begins: bool) -> float:
    began = time.perf_counter()
    for sends in (begins, not begins):
        if sends:
            distributed.send(message, other)
        else:
            distributed.recv(message, other)
    group.wait_for_device()
    return time.perf_counter() - began


def main(node: str) -> int:
    """Run the preflight and the measurements, and print the result. `node` is this node's name."""
    group, _ = connect_and_check()
    found = measure(group, node)
    if group.is_rank_zero:
        print(_PREFIX + json.dumps(found), flush=True)
    disconnect()
    return 0


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main(sys.argv[1]))
