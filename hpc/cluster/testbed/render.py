"""The text of the testbed's configuration files. Pure: the same shape, paths and host name give the same text."""

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

from hpc.cluster.testbed import layout
from hpc.cluster.testbed.layout import LOGIN_ADDRESS, LOGIN_NAME, TestbedShape

CLUSTER_NAME = "torchrelay"

# The port is 7817, not Slurm's 6817: a real slurmctld may run on this machine.
_CONTROLLER = f"""\
# Written by python -m hpc.testbed up, which overwrites changes.
ClusterName={CLUSTER_NAME}
SlurmctldHost={LOGIN_NAME}({LOGIN_ADDRESS})
SlurmctldPort=7817
# Listen on the bridge's address only, not on the machine's real interfaces.
CommunicationParameters=NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={layout.MUNGE_SOCKET}
SlurmUser=root
StateSaveLocation={layout.CONTROLLER_STATE}
SlurmdSpoolDir={layout.SPOOL}/%n
SlurmctldPidFile={layout.RUN}/slurmctld.pid
SlurmdPidFile={layout.RUN}/%n.pid
SlurmctldLogFile={layout.LOGS}/slurmctld.log
SlurmdLogFile={layout.LOGS}/%n.log
# The nodes declare more CPUs and memory than the machine has: use this file, not what slurmd detects.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
# A node that was down and registers again is used without an administrator.
ReturnToService=2
KillWait=15
SelectType=select/cons_tres
PreemptType=preempt/partition_prio
# Schedule at once after a submission (default: 2 to 3 s later), and every second (default: 60; backfill 30), so that
# a requeued job starts as soon as it may, not a minute later.
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=5
"""

# The usual values of settings that profiles replace.
_SETTINGS = {"JobRequeue": "1", "PreemptMode": "REQUEUE", "SelectTypeParameters": "CR_Core"}

_ACCOUNTING = f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={LOGIN_ADDRESS}
AccountingStoragePort=7819
# Not a password: with munge this names the socket; without it slurmctld uses the system's munged.
AccountingStoragePass={layout.MUNGE_SOCKET}
AccountingStorageTRES=gres/gpu
JobAcctGatherType=jobacct_gather/linux
"""

# On preemption, Slurm sends SIGTERM at once, and SIGKILL after GraceTime seconds. MaxTime is the longest time limit of
# a job. DefaultTime is the time limit of a job that requests none.
_GPU_PARTITION = {
    "PreemptMode": "REQUEUE", "GraceTime": "20", "MaxTime": "1-00:00:00", "DefaultTime": "01:00:00",
}  # fmt: skip
_URGENT_PARTITION = "PriorityTier=10 PreemptMode=OFF MaxTime=04:00:00 DefaultTime=00:30:00"
# The nodes only declare these: they may be more than the machine has.
_NODE = "Sockets=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=32768"

_SLURMDBD = f"""\
AuthType=auth/munge
AuthInfo=socket={layout.MUNGE_SOCKET}
DbdHost={LOGIN_NAME}
DbdAddr={LOGIN_ADDRESS}
DbdPort=7819
SlurmUser=root
PidFile={layout.RUN}/slurmdbd.pid
LogFile={layout.LOGS}/slurmdbd.log
StorageType=accounting_storage/mysql
# "localhost" means the Unix socket in MYSQL_UNIX_PORT: the database has no port and needs no password.
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
"""

_LOGIN = f"""\
#!/bin/sh
# Runs one daemon of the login host, in that host's namespaces.
set -eu
# slurmctld and munged resolve their own name, and slurmctld the name of every client: without this file each submission
# would query the machine's DNS.
mount -n --bind {layout.HOSTS} /etc/hosts
exec "$@"
"""

_BOOT = f"""\
#!/bin/sh
# Runs in the node's fresh network, mount and host-name namespaces, and becomes its slurmd.
set -eu
{{boot}}hostname {{name}}
# In a new network namespace the loopback is down, and torchrun connects to itself over it.
ip link set lo up
ip address add {{address}}/24 dev eth0
ip link set eth0 up
# -n: no entry below /run/mount, which the nodes share with the machine.
mount -n -t tmpfs -o mode=1777,nosuid,nodev tmpfs /tmp
mount -n -t tmpfs -o mode=1777,nosuid,nodev tmpfs /dev/shm
# There is no DNS.
mount -n --bind {layout.HOSTS} /etc/hosts
# -b: report a new boot, or slurmctld assumes that a revived node was never down.
exec slurmd -b -N {{name}} -f {layout.SLURM_CONF}
"""


def slurm_conf(shape: TestbedShape) -> str:
    """Return the text of slurm.conf."""
    # A dead node is marked down within a minute (Slurm's default is 300 s, and the tests would wait for it).
    settings = {"SlurmdTimeout": str(shape.slurmd_timeout), **_SETTINGS, **shape.kind.slurm_conf}
    text = f"{_CONTROLLER}{_assignments(settings, chr(10))}\n"
    if shape.has_accounting:
        text += _ACCOUNTING
    text += "GresTypes=gpu\n" if shape.gpus_per_node else ""
    types = _gpu_types(shape)
    for node in shape.all_nodes:
        text += f"NodeName={node.name} NodeAddr={node.address} {_NODE}"
        if node.name in types:
            # The weight sends a job that needs no GPUs to a node without GPUs, if one is free.
            text += f" Gres=gpu:{types[node.name]}{':' if types[node.name] else ''}{shape.gpus_per_node} Weight=2"
        text += "\n"
    gpu_partition = _assignments({**_GPU_PARTITION, **shape.kind.gpu_partition}, " ")
    text += f"PartitionName=gpu Nodes=ALL Default=YES PriorityTier=1 {gpu_partition}\n"
    return f"{text}PartitionName=urgent Nodes=ALL {_URGENT_PARTITION}\n"


def _assignments(values: Mapping[str, str], separator: str) -> str:
    return separator.join(f"{name}={value}" for name, value in values.items())


def _gpu_types(shape: TestbedShape) -> dict[str, str]:
    """Return the GPU type of each node that has GPUs, by the node's name. The type "" means GPUs without a type."""
    names = [node.name for node in shape.all_nodes] if shape.gpus_per_node else []
    pairs = zip(names, cycle(shape.kind.gpu_types), strict=False)
    return {name: gpu_type for name, gpu_type in pairs if gpu_type is not None}


def gres_conf(shape: TestbedShape) -> str:
    """Return the text of gres.conf. Every GPU needs a device file: with a count alone the node becomes INVAL."""
    last = shape.gpus_per_node - 1
    files = f"{layout.DEVICES}/nvidia[0-{last}]" if last else f"{layout.DEVICES}/nvidia0"
    lines = [
        f"NodeName={name} Name=gpu{' Type=' if gpu_type else ''}{gpu_type} File={files}\n"
        for name, gpu_type in _gpu_types(shape).items()
    ]
    return "".join(lines) or "# no GPUs\n"


def hosts(shape: TestbedShape, host_name: str) -> str:
    """Return the nodes' /etc/hosts. `host_name` is the machine's own, which jobs see as their submit host."""
    aliases = f"{LOGIN_NAME} {host_name}" if host_name not in {LOGIN_NAME, "localhost"} else LOGIN_NAME
    lines = ["127.0.0.1 localhost", "::1 localhost", f"{LOGIN_ADDRESS} {aliases}"]
    network = shape.kind.named_network
    lines += [f"{network}.{number} {node.name}" for number, node in enumerate(shape.all_nodes, 1)]
    return "\n".join(lines) + "\n"


def files(shape: TestbedShape, host_name: str) -> dict[Path, str]:
    """Return the text of every configuration file, by path. `up` compares them with existing files, or writes them."""
    found = {
        layout.SLURM_CONF: slurm_conf(shape),
        layout.GRES_CONF: gres_conf(shape),
        layout.HOSTS: hosts(shape, host_name),
        layout.LOGIN_SCRIPT: _LOGIN,
        **{layout.ROOT / name: text for name, text in shape.kind.files.items()},
    }
    if shape.has_accounting:
        found[layout.SLURMDBD_CONF] = _SLURMDBD
    for number, node in enumerate(shape.all_nodes, 1):
        found[layout.boot_script(node.name)] = _BOOT.format(
            boot=shape.kind.boot.replace("{number}", str(number)), name=node.name, address=node.address
        )
    return found
