"""Starts the login host's daemons: munged, slurmctld and, for accounting, MariaDB and slurmdbd. Runs as root."""

import os
from collections.abc import Mapping
from pathlib import Path

from hpc.base.errors import TorchrelayError
from hpc.base.files import write_atomic
from hpc.cluster.testbed import nodes
from hpc.cluster.testbed.layout import TestbedPaths
from hpc.cluster.testbed.render import CLUSTER_NAME
from hpc.cluster.testbed.system import run, start, succeeds, wait_until
from hpc.slurm.client import running_slurm_conf

# Suffixes of sinfo's node states; `*` marks a node that does not respond.
_STATE_FLAGS = "*~#!%$@^-+"
USABLE_STATES = frozenset({"idle", "mixed", "allocated", "completing"})


def _start_on_login_host(*command: str | Path, paths: TestbedPaths, log: Path, **environment: str) -> None:
    """Start a daemon of the login host. Its output goes to the file `log` until the daemon opens its own log."""
    host = nodes.inside_fresh(paths.controller_uts, "mount")
    start(*host, "/bin/sh", paths.login_script, *command, log=log, **environment)


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
    """Return whether munged issues credentials."""
    return succeeds("munge", "--no-input", f"--socket={paths.munge_socket}", "--output=/dev/null")


def start_slurmctld(paths: TestbedPaths) -> None:
    """Start the controller and wait until it answers."""
    _start_on_login_host("slurmctld", "-f", paths.slurm_conf, paths=paths, log=paths.log("slurmctld.out"))
    log = paths.log("slurmctld")
    wait_until(lambda: controller_answers(paths), seconds=30, what=f"slurmctld to answer (log: {log})")


def controller_answers(paths: TestbedPaths) -> bool:
    """Return whether slurmctld answers. If it does not run, return at once: Slurm's tools would retry for long."""
    return running_slurm_conf() is not None and succeeds("scontrol", "ping", SLURM_CONF=str(paths.slurm_conf))


# --- nodes, as slurmctld sees them ---


def node_states(paths: TestbedPaths) -> dict[str, str]:
    """Return the state of each node, in the words of `parse_states`; an empty dict if slurmctld does not answer."""
    if running_slurm_conf() is None:
        return {}
    # List all nodes: for a single node (-n) that is marked down, Slurm 22.05 reports `mixed*` until all are listed.
    sinfo = ("sinfo", "--noheader", "--Node", "--format=%N %T")
    try:
        text = run(*sinfo, timeout_seconds=10, SLURM_CONF=str(paths.slurm_conf))
    except TorchrelayError:
        return {}
    return parse_states(text)


def parse_states(text: str) -> dict[str, str]:
    """Return the state of each node, as sinfo's long word, from lines such as `gpu01 idle`.

    The state in `gpu01 idle*` is `unresponsive`: the node does not respond, but Slurm has not yet marked it down.
    """
    words = dict(line.split() for line in text.splitlines())
    states = {name: word.rstrip(_STATE_FLAGS) for name, word in words.items()}
    silent = {name for name, word in words.items() if "*" in word and states[name] in USABLE_STATES}
    return states | dict.fromkeys(silent, "unresponsive")


# --- accounting, for sacct ---


def start_accounting(paths: TestbedPaths, account: Mapping[str, str]) -> None:
    """Start MariaDB and slurmdbd, and register the cluster. If `account` has limits, add the account `users` with them.

    MariaDB listens only on a Unix socket that only root can reach.
    """
    data, user = f"--datadir={paths.database}", "--user=root"
    install = ("mariadb-install-db", "--no-defaults", data, user)
    run(*install, "--auth-root-authentication-method=socket", "--skip-test-db", timeout_seconds=120)
    _start_on_login_host(
        *("setsid", "--fork", "mariadbd", "--no-defaults", data, user),
        f"--socket={paths.database_socket}",
        f"--pid-file={paths.run}/mariadbd.pid",
        # Without this option, slurmdbd exits when two transactions conflict. With "loose", MariaDB 10.11, which lacks
        # the option, ignores it.
        "--loose-innodb-snapshot-isolation=OFF",
        "--skip-networking",
        # The database is temporary, so it is small and need not survive a crash.
        *("--innodb-buffer-pool-size=32M", "--innodb-log-file-size=8M", "--innodb-flush-log-at-trx-commit=0"),
        paths=paths,
        log=paths.log("mariadbd"),
    )
    ping = ("mariadb-admin", "--no-defaults", f"--socket={paths.database_socket}", "ping")
    wait_until(lambda: succeeds(*ping), seconds=60, what=f"mariadbd to answer (log: {paths.log('mariadbd')})")
    # At its first start, slurmdbd creates its tables, which takes a while.
    environment = {"SLURM_CONF": str(paths.slurm_conf), "MYSQL_UNIX_PORT": str(paths.database_socket)}
    _start_on_login_host("slurmdbd", paths=paths, log=paths.log("slurmdbd.out"), **environment)
    log = paths.log("slurmdbd")
    wait_until(lambda: accounting_answers(paths), seconds=60, what=f"slurmdbd to answer (log: {log})")
    add = ("sacctmgr", "--immediate", "add")
    run(*add, "cluster", CLUSTER_NAME, SLURM_CONF=str(paths.slurm_conf))
    if account:
        limits = (f"{name}={value}" for name, value in account.items())
        run(*add, "account", "users", *limits, SLURM_CONF=str(paths.slurm_conf))


def accounting_answers(paths: TestbedPaths) -> bool:
    """Return whether slurmdbd answers from its database."""
    return succeeds("sacctmgr", "--noheader", "list", "cluster", SLURM_CONF=str(paths.slurm_conf))
