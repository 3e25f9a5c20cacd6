"""The login host's daemons, munged and slurmctld, and how they are asked. Runs as root on the testbed's machine."""

import os

from hpc.errors import TorchrelayError
from hpc.files import write_atomic
from hpc.testbed import namespaces, running_slurm_conf
from hpc.testbed.layout import LOGIN_ADDRESS, LOGIN_NAME, Places
from hpc.testbed.system import run, start, succeeds, wait_until

# What sinfo appends to a node's state; `*` says that the node does not respond.
STATE_FLAGS = "*~#!%$@^-+"
USABLE_STATES = frozenset({"idle", "mixed", "allocated", "completing"})


def create_controller_host(places: Places) -> None:
    """Pin the namespace of the login host's daemons; its host name is the one that slurm.conf gives."""
    namespaces.pin(places.controller_uts, "hostname", LOGIN_NAME)


def remove_controller_host(places: Places) -> None:
    """End every daemon of the login host. No error if there is none."""
    namespaces.kill_all(places.controller_uts)
    namespaces.unpin(places.controller_uts)


def start_munged(places: Places) -> None:
    """Start munged with a key of our own on a socket of our own, apart from the machine's munge."""
    write_atomic(places.munge_key, os.urandom(128), mode=0o400)
    start(
        *namespaces.inside(places.controller_uts),
        "munged",
        f"--key-file={places.munge_key}",
        f"--socket={places.munge_socket}",
        f"--pid-file={places.run}/munged.pid",
        f"--log-file={places.log('munged')}",
        f"--seed-file={places.secret}/munged.seed",
        # Without it munged resolves its own host name, which only the nodes know.
        f"--origin={LOGIN_ADDRESS}",
        log=places.log("munged.out"),
    )
    wait_until(lambda: munge_answers(places), seconds=20, what=f"for munged to answer (log: {places.log('munged')})")


def munge_answers(places: Places) -> bool:
    """Whether munged gives credentials."""
    return succeeds("munge", "--no-input", f"--socket={places.munge_socket}", "--output=/dev/null")


def start_slurmctld(places: Places) -> None:
    """Start the controller and wait until it answers."""
    start(
        *namespaces.inside(places.controller_uts),
        "slurmctld",
        "-f",
        places.slurm_conf,
        log=places.log("slurmctld.out"),
    )
    log = places.log("slurmctld")
    wait_until(lambda: controller_answers(places), seconds=30, what=f"for slurmctld to answer (log: {log})")


def controller_answers(places: Places) -> bool:
    """Whether slurmctld answers; asked only if its process exists, because Slurm's tools are patient."""
    return running_slurm_conf() is not None and succeeds("scontrol", "ping", SLURM_CONF=str(places.slurm_conf))


def node_states(places: Places) -> dict[str, str]:
    """Each node's state in sinfo's long words, `unresponsive` for one that Slurm has not given up yet.

    Empty when slurmctld does not answer.
    """
    if running_slurm_conf() is None:
        return {}
    try:
        text = run("sinfo", "--noheader", "--Node", "--format=%N %T", SLURM_CONF=str(places.slurm_conf))
    except TorchrelayError:
        return {}
    return dict(_state(line) for line in text.splitlines())


def _state(line: str) -> tuple[str, str]:
    """Read one line of sinfo, such as `gpu01 idle*`."""
    name, word = line.split()
    state = word.rstrip(STATE_FLAGS)
    silent = "*" in word and state in USABLE_STATES
    return name, "unresponsive" if silent else state


def update_node(name: str, state: str, places: Places) -> None:
    """Tell slurmctld a node's state, as an admin does."""
    run(
        "scontrol",
        "update",
        f"NodeName={name}",
        f"State={state}",
        "Reason=testbed",
        SLURM_CONF=str(places.slurm_conf),
    )


def node_is_idle(name: str, places: Places) -> bool:
    """Whether a node waits for work."""
    return node_states(places).get(name) == "idle"
