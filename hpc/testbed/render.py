"""The testbed's configuration files as text. Pure: same shape, places and host name, same text."""

import shlex
from pathlib import Path

from hpc.testbed.layout import LOGIN_ADDRESS, LOGIN_NAME, TestbedNode, TestbedPaths, TestbedShape

CLUSTER_NAME = "torchrelay"
CONTROLLER_PORT = 7817  # not Slurm's 6817: a real slurmctld may live on this machine
DBD_PORT = 7819
DATABASE_NAME = "slurm_acct_db"

_CONTROLLER = """\
# Written by python -m hpc.testbed up; a change here is lost at the next one.
ClusterName={cluster}
SlurmctldHost={login}({address})
SlurmctldPort={port}
# Listen on the bridge's address alone, not on the machine's real interfaces.
CommunicationParameters=NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={munge_socket}
SlurmUser=root
StateSaveLocation={controller_state}
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/%n.pid
SlurmctldLogFile={logs}/slurmctld.log
SlurmdLogFile={logs}/%n.log
# The nodes pretend to have more CPUs and memory than the machine: believe this file, not what slurmd finds.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
# A node that was down and registers again is used again without an admin.
ReturnToService=2
# A dead node is noticed within a minute (Slurm's default is 300 s, and the tests would wait for it).
SlurmdTimeout={slurmd_timeout}
KillWait=15
JobRequeue=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# Schedule at once when a job comes (default: 2 to 3 s later), and every second (default: 60; backfill 30), so that a
# requeued job starts when it may, not a minute later.
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=5
"""

_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={address}
AccountingStoragePort={port}
# Not a password: with munge, this names the socket, and without it slurmctld asks the system's munged.
AccountingStoragePass={munge_socket}
AccountingStorageTRES=gres/gpu
JobAcctGatherType=jobacct_gather/linux
"""

# GraceTime: on preemption SIGTERM comes at once, SIGKILL this many seconds later. MaxTime and DefaultTime give
# time limits something to be checked against.
_PARTITIONS = """\
PartitionName=gpu Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 \
MaxTime=1-00:00:00 DefaultTime=01:00:00
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=04:00:00 DefaultTime=00:30:00
"""

_SLURMDBD = """\
AuthType=auth/munge
AuthInfo=socket={munge_socket}
DbdHost={login}
DbdAddr={address}
DbdPort={port}
SlurmUser=root
PidFile={run}/slurmdbd.pid
LogFile={logs}/slurmdbd.log
StorageType=accounting_storage/mysql
# "localhost" means the Unix socket that MYSQL_UNIX_PORT names: the database has no port and needs no password.
StorageHost=localhost
StorageUser=root
StorageLoc={database}
"""

_LOGIN = """\
#!/bin/sh
# Runs one daemon of the login host, in that host's namespaces.
set -eu
# slurmctld and munged look up their own name, and slurmctld the name of every client: without this file that would be
# a query to the machine's DNS for each submission.
mount -n --bind {hosts} /etc/hosts
exec "$@"
"""

_BOOT = """\
#!/bin/sh
# Runs in the node's fresh network, mount and host-name namespaces and becomes its slurmd.
set -eu
hostname {name}
# A new network namespace has its loopback down, and torchrun talks to itself over it.
ip link set lo up
ip address add {address}/24 dev eth0
ip link set eth0 up
# -n: no record of it below /run/mount, which the nodes share with the machine.
mount -n -t tmpfs -o mode=1777,nosuid,nodev tmpfs /tmp
mount -n -t tmpfs -o mode=1777,nosuid,nodev tmpfs /dev/shm
# torchrun's workers find each other by host name; there is no DNS here.
mount -n --bind {hosts} /etc/hosts
# -b: report a new boot, or slurmctld takes a revived node for one that was never gone.
exec slurmd -b -N {name} -f {slurm_conf}
"""


def _slots(places: TestbedPaths) -> dict[str, str]:
    """The paths that the templates name."""
    return {
        "munge_socket": str(places.munge_socket),
        "controller_state": str(places.controller_state),
        "spool": str(places.spool),
        "run": str(places.run),
        "logs": str(places.logs),
    }


def _node_line(shape: TestbedShape, node: TestbedNode) -> str:
    gres = f" Gres=gpu:{shape.gpus_per_node}" if shape.gpus_per_node else ""
    return (
        f"NodeName={node.name} NodeAddr={node.address} Sockets=1 CoresPerSocket={shape.cpus_per_node} "
        f"ThreadsPerCore=1 RealMemory={shape.memory_mb_per_node}{gres}\n"
    )


def slurm_conf(shape: TestbedShape, places: TestbedPaths) -> str:
    """The whole slurm.conf."""
    slots = _slots(places)
    text = _CONTROLLER.format(
        cluster=CLUSTER_NAME, login=LOGIN_NAME, address=LOGIN_ADDRESS, port=CONTROLLER_PORT,
        slurmd_timeout=shape.slurmd_timeout, **slots,
    )  # fmt: skip
    if shape.accounting:
        text += _ACCOUNTING.format(address=LOGIN_ADDRESS, port=DBD_PORT, **slots)
    text += "GresTypes=gpu\n" if shape.gpus_per_node else ""
    return text + "".join(_node_line(shape, node) for node in shape.all_nodes) + _PARTITIONS


def gres_conf(shape: TestbedShape, places: TestbedPaths) -> str:
    """The whole gres.conf. Every GPU needs a device file: a count without files leaves the node INVAL."""
    if not shape.gpus_per_node:
        return "# no GPUs\n"
    last = shape.gpus_per_node - 1
    files = f"{places.devices}/nvidia[0-{last}]" if last else f"{places.devices}/nvidia0"
    return f"Name=gpu File={files}\n"


def slurmdbd_conf(places: TestbedPaths) -> str:
    """The whole slurmdbd.conf."""
    return _SLURMDBD.format(
        login=LOGIN_NAME, address=LOGIN_ADDRESS, port=DBD_PORT, database=DATABASE_NAME, **_slots(places)
    )


def hosts(shape: TestbedShape, host_name: str) -> str:
    """The nodes' /etc/hosts; `host_name` is the machine's own, under which users' jobs know their submit host."""
    aliases = f"{LOGIN_NAME} {host_name}" if host_name not in {LOGIN_NAME, "localhost"} else LOGIN_NAME
    lines = ["127.0.0.1 localhost", "::1 localhost", f"{LOGIN_ADDRESS} {aliases}"]
    return "\n".join([*lines, *(f"{node.address} {node.name}" for node in shape.all_nodes)]) + "\n"


def boot_script(node: TestbedNode, places: TestbedPaths) -> str:
    """The commands that turn fresh namespaces into the node."""
    return _BOOT.format(
        name=shlex.quote(node.name),
        address=shlex.quote(node.address),
        hosts=shlex.quote(str(places.hosts)),
        slurm_conf=shlex.quote(str(places.slurm_conf)),
    )


def login_script(places: TestbedPaths) -> str:
    """The commands that turn a fresh mount namespace into the login host's, and then run its arguments."""
    return _LOGIN.format(hosts=shlex.quote(str(places.hosts)))


def files(shape: TestbedShape, places: TestbedPaths, host_name: str) -> dict[Path, str]:
    """Every configuration file: what `up` writes, and what it compares to recognise a testbed of the same shape."""
    found = {
        places.slurm_conf: slurm_conf(shape, places),
        places.gres_conf: gres_conf(shape, places),
        places.hosts: hosts(shape, host_name),
        places.login_script: login_script(places),
        **{places.boot_script(node): boot_script(node, places) for node in shape.all_nodes},
    }
    if shape.accounting:
        found[places.slurmdbd_conf] = slurmdbd_conf(places)
    return found
