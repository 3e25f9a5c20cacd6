"""Starts the login host's daemons: munged, slurmctld and, for accounting, MariaDB and slurmdbd. Runs as root."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpc.base.errors import TorchrelayError
from hpc.base.files import write_atomic
from hpc.cluster.testbed import layout, nodes
from hpc.cluster.testbed.render import CLUSTER_NAME
from hpc.cluster.testbed.system import run, start, succeeds, wait_until
from hpc.slurm.client import running_slurm_conf

# Suffixes of sinfo's node states; `*` marks a node that does not respond.
_STATE_FLAGS = "*~#!%$@^-+"
USABLE_STATES = frozenset({"idle", "mixed", "allocated", "completing"})


def _start(
    *command: str | Path, answers: Callable[[], bool], seconds: float, prefix: Sequence[str] = (), **environment: str
) -> None:
    """Start a daemon of the login host, and wait until it answers. It writes to NAME.out until it opens its own log."""
    login = (*nodes.inside_fresh(layout.CONTROLLER_UTS, "mount"), "/bin/sh", str(layout.LOGIN_SCRIPT))
    start(*login, *prefix, *command, log=layout.log_of(f"{command[0]}.out"), **environment)
    wait_until(answers, seconds=seconds, what=f"{command[0]} to answer (logs: {layout.LOGS})")


def start_munged() -> None:
    """Start munged with a new key and its own socket, separate from the machine's munge."""
    write_atomic(layout.MUNGE_KEY, os.urandom(128), mode=0o400)
    _start(
        "munged",
        f"--key-file={layout.MUNGE_KEY}",
        f"--socket={layout.MUNGE_SOCKET}",
        f"--pid-file={layout.RUN}/munged.pid",
        f"--log-file={layout.log_of('munged')}",
        f"--seed-file={layout.SECRET}/munged.seed",
        answers=munge_answers,
        seconds=20,
    )


def munge_answers() -> bool:
    """Return whether munged issues credentials."""
    return succeeds("munge", "--no-input", f"--socket={layout.MUNGE_SOCKET}", "--output=/dev/null")


def start_slurmctld() -> None:
    """Start the controller."""
    _start("slurmctld", "-f", layout.SLURM_CONF, answers=controller_answers, seconds=30)


def controller_answers() -> bool:
    """Return whether slurmctld answers. If it does not run, return at once: Slurm's tools would retry for long."""
    return running_slurm_conf() is not None and succeeds("scontrol", "ping")


# --- nodes, as slurmctld sees them ---


def node_states() -> dict[str, str]:
    """Return the state of each node, in the words of `parse_states`; an empty dict if slurmctld does not answer."""
    if running_slurm_conf() is None:
        return {}
    # List all nodes: for a single node (-n) that is marked down, Slurm 22.05 reports `mixed*` until all are listed.
    sinfo = ("sinfo", "--noheader", "--Node", "--format=%N %T")
    try:
        text = run(*sinfo, timeout_seconds=10)
    except TorchrelayError:
        return {}
    return parse_states(text)


def parse_states(text: str) -> dict[str, str]:
    """Return the state of each node from sinfo's lines of a node and its state, such as `gpu01 idle`.

    The state in `gpu01 idle*` is `unresponsive`: the node does not respond, but Slurm has not yet marked it down.
    """
    words = dict(line.split() for line in text.splitlines())
    states = {name: word.rstrip(_STATE_FLAGS) for name, word in words.items()}
    silent = {name for name, word in words.items() if "*" in word and states[name] in USABLE_STATES}
    return states | dict.fromkeys(silent, "unresponsive")


# --- accounting, for sacct ---


def start_accounting(account: Mapping[str, str]) -> None:
    """Start MariaDB and slurmdbd, and register the cluster. If `account` has limits, add the account `users` with them.

    MariaDB listens only on a Unix socket that only root can reach.
    """
    data, user = f"--datadir={layout.DATABASE}", "--user=root"
    install = ("mariadb-install-db", "--no-defaults", data, user)
    run(*install, "--auth-root-authentication-method=socket", "--skip-test-db", timeout_seconds=120)
    socket = f"--socket={layout.DATABASE_SOCKET}"
    _start(
        *("mariadbd", "--no-defaults", data, user, socket, "--skip-networking"),
        f"--pid-file={layout.RUN}/mariadbd.pid",
        # Without this option, slurmdbd exits when two transactions conflict. With "loose", MariaDB 10.11, which lacks
        # the option, ignores it.
        "--loose-innodb-snapshot-isolation=OFF",
        # The database is temporary, so it is small and need not survive a crash.
        *("--innodb-buffer-pool-size=32M", "--innodb-log-file-size=8M", "--innodb-flush-log-at-trx-commit=0"),
        answers=lambda: succeeds("mariadb-admin", "--no-defaults", socket, "ping"),
        seconds=60,
        prefix=("setsid", "--fork"),
    )
    # At its first start, slurmdbd creates its tables, which takes a while.
    environment = {"SLURM_CONF": str(layout.SLURM_CONF), "MYSQL_UNIX_PORT": str(layout.DATABASE_SOCKET)}
    _start("slurmdbd", answers=accounting_answers, seconds=60, **environment)
    add = ("sacctmgr", "--immediate", "add")
    run(*add, "cluster", CLUSTER_NAME)
    if account:
        limits = (f"{name}={value}" for name, value in account.items())
        run(*add, "account", "users", *limits)


def accounting_answers() -> bool:
    """Return whether slurmdbd answers from its database."""
    return succeeds("sacctmgr", "--noheader", "list", "cluster")
