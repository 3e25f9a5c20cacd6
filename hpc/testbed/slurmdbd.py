"""Accounting for the testbed: a private MariaDB and slurmdbd, so that sacct works. Runs as root on its machine."""

from hpc.testbed.daemons import start_on_login_host
from hpc.testbed.layout import TestbedPaths
from hpc.testbed.render import CLUSTER_NAME
from hpc.testbed.system import run, succeeds, wait_until


def start_accounting(places: TestbedPaths) -> None:
    """Start the database and slurmdbd, and register the cluster."""
    _start_database(places)
    _start_slurmdbd(places)
    slurm_conf = str(places.slurm_conf)
    run("sacctmgr", "--immediate", "add", "cluster", CLUSTER_NAME, SLURM_CONF=slurm_conf)


def accounting_answers(places: TestbedPaths) -> bool:
    """Whether slurmdbd answers from its database."""
    return succeeds("sacctmgr", "--noheader", "list", "cluster", SLURM_CONF=str(places.slurm_conf))


def _start_database(places: TestbedPaths) -> None:
    """Create and start a MariaDB that listens on a Unix socket only, which root alone can reach."""
    data = f"--datadir={places.database}"
    run(
        "mariadb-install-db",
        "--no-defaults",
        data,
        "--user=root",
        "--auth-root-authentication-method=socket",
        "--skip-test-db",
        timeout_seconds=120,
    )
    start_on_login_host(
        *("setsid", "--fork", "mariadbd", "--no-defaults", data, "--user=root"),
        f"--socket={places.database_socket}",
        f"--pid-file={places.run}/mariadbd.pid",
        "--skip-networking",
        # A throw-away database: small, and in no hurry to reach the disk.
        *("--innodb-buffer-pool-size=32M", "--innodb-log-file-size=8M", "--innodb-flush-log-at-trx-commit=0"),
        places=places,
        log=places.log("mariadbd"),
    )
    ping = ("mariadb-admin", "--no-defaults", f"--socket={places.database_socket}", "ping")
    wait_until(lambda: succeeds(*ping), seconds=60, what=f"for mariadbd to answer (log: {places.log('mariadbd')})")


def _start_slurmdbd(places: TestbedPaths) -> None:
    """Start slurmdbd; it creates its tables at the first start."""
    environment = {"SLURM_CONF": str(places.slurm_conf), "MYSQL_UNIX_PORT": str(places.database_socket)}
    start_on_login_host("slurmdbd", places=places, log=places.log("slurmdbd.out"), **environment)
    log = places.log("slurmdbd")
    wait_until(lambda: accounting_answers(places), seconds=60, what=f"for slurmdbd to answer (log: {log})")
