"""Measures the devices of the ranks and the network between their nodes, for `hpc doctor --nodes`. Runs on every rank.

`python -m training.engine.rank_benchmark` runs under torchrun and begins with the preflight. The first rank of each
node prints one line of JSON for its node. Each speed is that of the fastest of several tries: a device or link that is
slow once may have been disturbed.
"""

import faulthandler
import json
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import distributed

from training.engine.preflight import connect_and_check
from training.runtime.process_group import ProcessGroup, disconnect
from training.runtime.rank_device import device_name

# jobs.node_probe finds the result by this prefix.
_PREFIX = "benchmark: "
_TRIES = 6
_MATRIX_SIDE = {"cpu": 1024, "cuda": 8192}
# Size of a message that shows the bandwidth even of a fast link. On a gigabit link, 8 MiB take a tenth of a second.
_MESSAGE_BYTES = {"cpu": 2**23, "cuda": 2**26}


def _fastest(group: ProcessGroup, work: Callable[[], object]) -> float:
    """Return the seconds of the fastest try."""
    seconds = []
    for _ in range(_TRIES):
        group.wait_for_device()
        began = time.perf_counter()
        work()
        group.wait_for_device()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _teraflops(group: ProcessGroup) -> float:
    """Return the speed of a matrix product, in float32 on a CPU, in bfloat16 on a GPU. All ranks compute together."""
    side, dtype = _MATRIX_SIDE[group.device.type], torch.bfloat16 if group.device.type == "cuda" else torch.float32
    left, right = (torch.ones(side, side, device=group.device, dtype=dtype) for _ in range(2))
    distributed.barrier(group=group.control)
    return round(2 * side**3 / _fastest(group, lambda: left @ right) / 1e12, 3)


def _network(group: ProcessGroup) -> float | None:
    """Return the GB/s of the faster one of this node's links to its two neighbours in a ring of all nodes.

    A slow link thus counts only for a node whose links are both slow. None on a single node, and on all ranks but the
    first of a node. All ranks must call this.
    """
    per_node = group.rank_info.local_world_size
    nodes, own = group.world_size // per_node, group.rank // per_node
    message = torch.zeros(_MESSAGE_BYTES[group.device.type] // 4, device=group.device)
    speeds = []
    for first in range(nodes if nodes > 1 else 0):
        pair = first, (first + 1) % nodes
        distributed.barrier(group=group.control)  # one link at a time: links may share a switch
        if group.rank_info.local_rank == 0 and own in pair:
            begins = own == first
            exchange = partial(_send_and_receive, message, pair[begins] * per_node, begins=begins)
            speeds.append(round(2 * message.nbytes / _fastest(group, exchange) / 1e9, 4))
    return max(speeds, default=None)


def _send_and_receive(message: torch.Tensor, other: int, *, begins: bool) -> None:
    for sends in (begins, not begins):
        if sends:
            distributed.send(message, other)
        else:
            distributed.recv(message, other)


def main() -> int:
    """Run the preflight and the measurements. The first rank of each node prints fields of `NodeInfo`."""
    group, report = connect_and_check()
    first = group.rank - group.rank_info.local_rank
    teraflops = group.all_gather_json(_teraflops(group))[first : first + group.rank_info.local_world_size]
    all_reduce = min(filter(None, group.all_gather_json(report.allreduce_gb_per_second)), default=None)
    fields = {
        "world_size": group.world_size, "device": device_name(group.device), "teraflops": teraflops,
        "network_gb_per_second": _network(group), "all_reduce_gb_per_second": all_reduce,
    }  # fmt: skip
    if group.rank_info.local_rank == 0:
        print(_PREFIX + json.dumps(fields), flush=True)
    disconnect()
    return 0


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
