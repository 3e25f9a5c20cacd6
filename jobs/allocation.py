"""This process's place in the job: its nodes, and which of them this one is. Runs on compute nodes."""

from collections.abc import Mapping
from dataclasses import dataclass

import submitit


@dataclass(frozen=True, kw_only=True)
class NodeAllocation:
    """The nodes of a job, as one of them sees it."""

    cluster: str
    job_id: str
    restart: int
    """How often Slurm has restarted the job."""
    node_rank: int
    hostnames: tuple[str, ...]
    """By node rank."""
    cpus: int | None

    @property
    def is_head(self) -> bool:
        """The head node's agent claims the attempt, coordinates it, and asks for the requeue."""
        return self.node_rank == 0

    @property
    def num_nodes(self) -> int:
        """Nodes in the allocation."""
        return len(self.hostnames)

    @property
    def head(self) -> str:
        """Host name of the first node: srun's task 0 runs there."""
        return self.hostnames[0]

    @property
    def host(self) -> str:
        """This node's host name."""
        return self.hostnames[self.node_rank]

    def names(self, node_ranks: set[int]) -> list[str]:
        """Host names of some nodes, by node rank."""
        return [self.hostnames[node_rank] for node_rank in sorted(node_ranks)]


def find_allocation(environment: Mapping[str, str]) -> NodeAllocation:
    """Read the allocation from the environment.

    Raises:
        RuntimeError: the process was started neither by srun nor by submitit's local executor.
    """
    job = submitit.JobEnvironment()
    local = environment.get("SUBMITIT_EXECUTOR") == "local"
    cpus = environment.get("SLURM_CPUS_PER_TASK")
    return NodeAllocation(
        cluster="local" if local else "slurm",
        job_id=job.job_id,
        restart=int(environment.get("SLURM_RESTART_COUNT", "0")),
        node_rank=job.global_rank,
        hostnames=("localhost",) * job.num_tasks if local else tuple(job.hostnames),
        cpus=int(cpus) if cpus else None,
    )
