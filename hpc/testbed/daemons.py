"""The login host's daemons, munged and slurmctld, and how they are asked. Runs as root on the testbed's machine."""

import os
from pathlib import Path

from hpc.core.errors import TorchrelayError
from hpc.core.files import write_atomic
from hpc.slurm.client import running_slurm_conf
from hpc.testbed import namespaces
from hpc.testbed.layout import LOGIN_NAME, TestbedPaths
from hpc.testbed.system import run, start, succeeds, wait_until

# What sinfo appends to a node's state; `*` says that the node does not respond.
STATE_FLAGS = "*~#!%$@^-+"
USABLE_STATES = frozenset({"idle", "mixed", "allocated", "completing"})
# All nodes, always: asked for one node (-n), Slurm 22.05 goes on saying `mixed*` of a node that it has called down,
# until somebody asks for all.
_SINFO_WORDS = ("--noheader", "--Node", "--format=%N %T")


def create_controller_host(places: TestbedPaths) -> None:
    """Pin the namespace of the login host's daemons; its host name is the one that slurm.conf gives."""
    namespaces.pin(places.controller_uts, "hostname", LOGIN_NAME)


def start_on_login_host(*command: str | Path, places: TestbedPaths, log: Path, **environment: str) -> None:
    """Start a daemon of the login host; `log` is for what it says before it has opened its own."""
    host = namespaces.inside_fresh(places.controller_uts, "mount")
    start(*host, "/bin/sh", places.login_script, *command, log=log, **environment)


def remove_controller_host(places: TestbedPaths) -> None:
    """End every daemon of the login host. No error if there is none."""
    namespaces.kill_all(places.controller_uts)
    namespaces.unpin(places.controller_uts)


def start_munged(places: TestbedPaths) -> None:
    """Start munged with a key of our own on a socket of our own, apart from the machine's munge."""
    write_atomic(places.munge_key, os.urandom(128), mode=0o400)
    start_on_login_host(
        "munged",
        f"--key-file={places.munge_key}",
        f"--socket={places.munge_socket}",
        f"--pid-file={places.run}/munged.pid",
        f"--log-file={places.log('munged')}",
        f"--seed-file={places.secret}/munged.seed",
        places=places,
        log=places.log("munged.out"),
    )
    wait_until(lambda: munge_answers(places), seconds=20, what=f"for munged to answer (log: {places.log('munged')})")


def munge_answers(places: TestbedPaths) -> bool:
    """Whether munged gives credentials."""
    return succeeds("munge", "--no-input", f"--socket={places.munge_socket}", "--output=/dev/null")


def start_slurmctld(places: TestbedPaths) -> None:
    """Start the controller and wait until it answers."""
    start_on_login_host("slurmctld", "-f", places.slurm_conf, places=places, log=places.log("slurmctld.out"))
    log = places.log("slurmctld")
    wait_until(lambda: controller_answers(places), seconds=30, what=f"for slurmctld to answer (log: {log})")


def controller_answers(places: TestbedPaths) -> bool:
    """Whether slurmctld answers; asked only if its process exists, because Slurm's tools are patient."""
    return running_slurm_conf() is not None and succeeds("scontrol", "ping", SLURM_CONF=str(places.slurm_conf))


def node_states(places: TestbedPaths) -> dict[str, str]:
    """Each node's state in sinfo's long words, `unresponsive` for one that Slurm has not given up yet.

    Empty when slurmctld does not answer.
    """
    if running_slurm_conf() is None:
        return {}
    try:
        text = run("sinfo", *_SINFO_WORDS, timeout_seconds=10, SLURM_CONF=str(places.slurm_conf))
    except TorchrelayError:
        return {}
    return parse_states(text)


def parse_states(text: str) -> dict[str, str]:
    """Read sinfo's lines, such as `gpu01 idle*`: a node to its state."""
    words = dict(line.split() for line in text.splitlines())
    states = {name: word.rstrip(STATE_FLAGS) for name, word in words.items()}
    silent = {name for name, word in words.items() if "*" in word and states[name] in USABLE_STATES}
    return states | dict.fromkeys(silent, "unresponsive")


def update_node(name: str, state: str, places: TestbedPaths) -> None:
    """Tell slurmctld a node's state, as an admin does."""
    run(
        "scontrol",
        "update",
        f"NodeName={name}",
        f"State={state}",
        "Reason=testbed",
        SLURM_CONF=str(places.slurm_conf),
    )


def node_is_idle(name: str, places: TestbedPaths) -> bool:
    """Whether a node waits for work."""
    return node_states(places).get(name) == "idle"
