"""The login host's daemons, munged and slurmctld. Runs as root on its machine."""

import os
from pathlib import Path

from hpc.core.errors import TorchrelayError
from hpc.core.files import write_atomic
from hpc.slurm.client import running_slurm_conf
from hpc.testbed import nodes
from hpc.testbed.layout import TestbedPaths
from hpc.testbed.system import run, start, succeeds, wait_until

# Suffixes of sinfo's node states; `*` marks a node that does not respond.
_STATE_FLAGS = "*~#!%$@^-+"
USABLE_STATES = frozenset({"idle", "mixed", "allocated", "completing"})


def _start_on_login_host(*command: str | Path, paths: TestbedPaths, log: Path) -> None:
    """Start a daemon of the login host; `log` receives its output until it opens its own log."""
    start(*nodes.inside_fresh(paths.controller_uts, "mount"), "/bin/sh", paths.login_script, *command, log=log)


def start_munged(paths: TestbedPaths) -> None:
    """Start munged with a new key and its own socket, separate from the machine's munge."""
    write_atomic(paths.munge_key, os.urandom(128), mode=0o400)
    _start_on_login_host(
        "munged",
        f"--key-file={paths.munge_key}",
        f"--socket={paths.munge_socket}",
        f"--pid-file={paths.run}/munged.pid",
        f"--log-file={paths.log('munged')}",
        f"--seed-file={paths.secret}/munged.seed",
        paths=paths,
        log=paths.log("munged.out"),
    )
    wait_until(lambda: munge_answers(paths), seconds=20, what=f"munged to answer (log: {paths.log('munged')})")


def munge_answers(paths: TestbedPaths) -> bool:
    """Whether munged issues credentials."""
    return succeeds("munge", "--no-input", f"--socket={paths.munge_socket}", "--output=/dev/null")


def start_slurmctld(paths: TestbedPaths) -> None:
    """Start the controller and wait until it answers."""
    _start_on_login_host("slurmctld", "-f", paths.slurm_conf, paths=paths, log=paths.log("slurmctld.out"))
    log = paths.log("slurmctld")
    wait_until(lambda: controller_answers(paths), seconds=30, what=f"slurmctld to answer (log: {log})")


def controller_answers(paths: TestbedPaths) -> bool:
    """Whether slurmctld answers. Asks only if its process exists: Slurm's tools retry for long."""
    return running_slurm_conf() is not None and succeeds("scontrol", "ping", SLURM_CONF=str(paths.slurm_conf))


def node_states(paths: TestbedPaths) -> dict[str, str]:
    """Each node's state, as `parse_states` returns it; empty if slurmctld does not answer."""
    if running_slurm_conf() is None:
        return {}
    # Always all nodes: asked for one (-n), Slurm 22.05 goes on reporting `mixed*` for a node that it has marked down,
    # until somebody asks for all.
    sinfo = ("sinfo", "--noheader", "--Node", "--format=%N %T")
    try:
        text = run(*sinfo, timeout_seconds=10, SLURM_CONF=str(paths.slurm_conf))
    except TorchrelayError:
        return {}
    return parse_states(text)


def parse_states(text: str) -> dict[str, str]:
    """States by node in sinfo's long words, from lines such as `gpu01 idle`.

    `unresponsive` is a node that Slurm has not yet marked down: `gpu01 idle*`.
    """
    words = dict(line.split() for line in text.splitlines())
    states = {name: word.rstrip(_STATE_FLAGS) for name, word in words.items()}
    silent = {name for name, word in words.items() if "*" in word and states[name] in USABLE_STATES}
    return states | dict.fromkeys(silent, "unresponsive")
