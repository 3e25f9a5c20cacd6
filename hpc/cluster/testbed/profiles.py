"""The kinds of cluster that a testbed can simulate, as differences from the usual configuration. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ProfileName = Literal[
    "usual", "typed", "bare", "cancel", "suspend", "strict", "addresses", "ranges", "private", "expedited"
]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A kind of cluster. The defaults are the usual kind."""

    slurm_conf: Mapping[str, str] = field(default_factory=dict)
    """Values of slurm.conf that replace the usual ones."""
    gpu_partition: Mapping[str, str] = field(default_factory=dict)
    """Values that replace the usual ones of the partition `gpu`, whose jobs can be preempted."""
    gpu_types: tuple[str | None, ...] = ("",)
    """GPU type of each node, repeated for further nodes. "" means GPUs without a type, None means no GPUs."""
    node_name: str = "gpu{:02d}"
    """Format of a node's name from its number, which counts from 1."""
    account: Mapping[str, str] = field(default_factory=dict)
    """Limits of the account `users`. If not empty, accounting runs."""
    named_network: str = "10.77.0"
    """Network of the addresses to which the nodes' names resolve. NodeAddr is always in the network 10.77.0."""
    boot: str = ""
    """Commands that each node runs first when it boots; `{number}` is the node's number."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Slurm's further configuration files, by name."""


# Slurm asks no plugin about a requeue, but a plugin can mark every new job as one that must not be requeued.
_NO_REQUEUE_NO_UPDATE = """\
function slurm_job_submit(job, partitions, user)
   job.requeue = 0
   return slurm.SUCCESS
end
function slurm_job_modify(job, old, partitions, user)
   return slurm.ESLURM_ACCESS_DENIED
end
"""

# On eth1, nobody answers: no node reaches another. eth2 has only IPv6. On eth0, the ports of Slurm, the ports 20000 to
# 20999, and the ports that the kernel assigns (30000 to 30999) are open. Routing rules close most other ports, because
# a firewall needs further packages.
_THREE_NETWORKS = """\
ip link add eth1 type veth peer name closed
ip address add 10.88.0.{number}/24 dev eth1
ip link set closed up
ip link set eth1 up
ip link add link eth0 name eth2 type macvlan mode bridge
ip address add fd77::{number}/64 dev eth2 nodad
ip link set eth2 up
echo 30000 30999 >/proc/sys/net/ipv4/ip_local_port_range
ip rule add pref 100 to 10.77.0.254 lookup main
for closed in 1024-6817 6819-7816 7818-19999 21000-29999 31000-65534; do
	ip rule add pref 200 iif lo to 10.77.0.0/24 ipproto tcp dport $closed blackhole
done
"""

# job_container/tmpfs keeps the jobs' directories and mount namespaces in /mnt. Linux 6.18 numbers namespaces, from a
# separate range for each CPU, and mounts a namespace only within one with a lower number. So the node's own namespace
# must be made on the CPU with the lowest numbers. Otherwise, jobs that start on some CPUs fail.
_PRIVATE_DIRECTORIES = """\
mount -n -t tmpfs -o mode=755 tmpfs /mnt
touch /mnt/probe
last=$(($(nproc --all) - 1))
for cpu in $(seq 0 $last); do
	if ! taskset --cpu-list $cpu unshare --mount=/mnt/probe true; then
		export home=$((${home:--1} + 1))
		[ $home -le $last ]
		exec taskset --cpu-list $home unshare --mount --propagation=slave taskset --cpu-list 0-$last sh "$0"
	fi
	umount /mnt/probe
done
"""

# The kernel has one table of 1,024 neighbours for all networks of the machine (gc_thresh3). 32 nodes that talk to each
# other fill the table, and packets are lost. Permanent neighbours do not count towards the limit.
_KNOWN_NEIGHBOURS = """\
ip link set eth0 address 02:00:00:00:00:$(printf %02x {number})
for other in $(seq 99); do
	echo neigh replace 10.77.0.$other lladdr 02:00:00:00:00:$(printf %02x $other) dev eth0 nud permanent
done | ip -batch -
"""

PROFILES: dict[ProfileName, Profile] = {
    "usual": Profile(),
    "typed": Profile(slurm_conf={"SelectTypeParameters": "CR_CPU"}, gpu_types=("a100", "a100", "h100", None)),
    "bare": Profile(
        slurm_conf={"JobRequeue": "0", "SlurmdTimeout": "300"},
        gpu_partition={"GraceTime": "0", "MaxTime": "00:05:00", "DefaultTime": "00:05:00"},
    ),
    "cancel": Profile(slurm_conf={"PreemptMode": "CANCEL"}, gpu_partition={"PreemptMode": "CANCEL"}),
    # Without FORCE, no two jobs share a node, so Slurm cannot suspend one for the other.
    "suspend": Profile(
        slurm_conf={"PreemptMode": "SUSPEND,GANG"},
        gpu_partition={"PreemptMode": "SUSPEND", "GraceTime": "0", "OverSubscribe": "FORCE:1"},
    ),
    "strict": Profile(
        slurm_conf={"AccountingStorageEnforce": "associations,limits,qos", "JobSubmitPlugins": "lua"},
        account={"MaxSubmitJobs": "1"},
        files={"job_submit.lua": _NO_REQUEUE_NO_UPDATE},
    ),
    "addresses": Profile(named_network="10.88.0", boot=_THREE_NETWORKS),
    "ranges": Profile(node_name="gpu{:03d}", boot=_KNOWN_NEIGHBOURS),
    "private": Profile(
        slurm_conf={"JobContainerType": "job_container/tmpfs", "PrologFlags": "Contain"},
        files={"job_container.conf": "AutoBasePath=true\nBasePath=/mnt\n"},
        boot=_PRIVATE_DIRECTORIES,
    ),
    # Before Slurm 25.11, which introduced this parameter, the profile behaves like the usual one.
    "expedited": Profile(slurm_conf={"SlurmctldParameters": "enable_expedited_requeue"}),
}
