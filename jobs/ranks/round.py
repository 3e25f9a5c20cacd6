"""One round on one node: torchrun from its start to its end, or until something better is to be done.

Runs on compute nodes.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from jobs.context import AgentContext
from jobs.control.messages import Directive
from jobs.ranks import script_command, trainer_command
from jobs.ranks.rendezvous import NodeAllocation, Rendezvous, interface_of, local_address, program_argv, torchrun_argv
from jobs.ranks.torchrun import Torchrun
from jobs.staging import unpack_environment

_POLL_SECONDS = 0.1
# After a request to stop, a torchrun without ranks only waits in its rendezvous for nodes that will not come.
_WITHOUT_RANKS_SECONDS = 5.0
_KEEPER = Path(__file__).with_name("rank_wrapper.py")


def run_round(node: AgentContext, orders: Directive, data: Path | None, threads: int) -> int | None:
    """Take part in a round. Returns torchrun's exit code, or None if it was ended because of new orders."""
    node.ranks.begin(orders.round, ours=orders.preflight or node.spec.train is not None)
    argv, environment = _command(node, orders, data, threads)
    aborts, patience = orders.aborts, 0.0
    with Torchrun(argv, environment, node.run.code) as torchrun:
        ranks_seen = time.monotonic()
        while torchrun.exit_code is None:
            node.turn()
            now = node.orders
            if now.over or now.round != orders.round or node.head_is_lost:
                return None
            if now.aborts > aborts:
                aborts = now.aborts
                torchrun.abort_ranks()
            if node.stop.signal:
                torchrun.tell(node.stop.signal)
                ranks_seen = time.monotonic() if torchrun.ranks() else ranks_seen
                patience = patience or node.patience_seconds
                if _is_out_of_patience(node, ranks_seen, patience):
                    break
            time.sleep(_POLL_SECONDS)
        return 1 if torchrun.exit_code is None else torchrun.exit_code


def _is_out_of_patience(node: AgentContext, ranks_seen: float, patience: float) -> bool:
    """Whether ranks that were asked to stop take too long, or there are none that could."""
    without = min(time.monotonic() - ranks_seen, node.stop.seconds)
    return without > _WITHOUT_RANKS_SECONDS or node.stop.seconds > patience


def _command(
    node: AgentContext, orders: Directive, data: Path | None, threads: int
) -> tuple[list[str], dict[str, str]]:
    """The command line and environment of torchrun on this node."""
    spec, run, attempt = node.spec, node.run, node.attempt
    logs = run.attempt_logs(attempt.attempt)
    logs.mkdir(parents=True, exist_ok=True)
    ranks, place = spec.resources.gpus_per_node, node.place
    rendezvous = Rendezvous(
        run=run.name, attempt=attempt.attempt, nonce=attempt.nonce, round=orders.round,
        members=tuple(place.hostnames[rank] for rank in orders.members), port=orders.port,
        is_host=orders.members[0] == place.node_rank,
    )  # fmt: skip
    address = local_address(place)
    environment = rank_environment(
        unpack_environment.activated(os.environ, node.python), place, ranks, address, threads
    )
    if spec.train is not None:
        program = trainer_command.command(run, attempt.attempt, data, node.memory, node.python)
    elif orders.preflight:
        program = script_command.preflight(run, attempt.attempt, node.python)
    else:
        program = script_command.command(spec.script, run, node.python)
        environment = script_command.environment(environment, run, attempt.attempt, data)
    keeper = [node.python, "-S", str(_KEEPER), str(logs), str(node.memory.path)]
    argv = torchrun_argv(rendezvous, ranks, address, node.python)
    return [*argv, *program_argv([*keeper, *program])], environment


def rank_environment(
    base: Mapping[str, str], place: NodeAllocation, ranks: int, address: str, threads: int
) -> dict[str, str]:
    """What the ranks of this node find in their environment beside torchrun's own variables."""
    changes = {
        "OMP_NUM_THREADS": str(threads),
        # A hung rank is sent SIGABRT: Python then prints where it is.
        "PYTHONFAULTHANDLER": "1",
    }
    # gloo publishes the address that this node's own name resolves to, and on many systems that is 127.0.1.1.
    interface = interface_of(address)
    if interface:
        changes["GLOO_SOCKET_IFNAME"] = interface
    visible = base.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if place.cluster == "local" and len(visible) == ranks * place.num_nodes:
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(visible[place.node_rank * ranks : (place.node_rank + 1) * ranks])
    return {**base, **changes}
