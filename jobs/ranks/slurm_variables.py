"""Slurm's variables for a rank, as if srun had started each rank as a task. Runs on compute nodes.

srun starts one task on each node, the agent, so the ranks would inherit the same SLURM_PROCID and SLURM_LOCALID on each
node. Scripts and libraries take these for the rank and the local rank, and SLURM_NTASKS for the world size.
"""

from collections.abc import Mapping, Sequence

NODE_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")
"""Variables with the names of the nodes. Scripts look in them for the node of rank 0."""


def node_lists(hostnames: Sequence[str], members: Sequence[int]) -> dict[str, str]:
    """Return the variables with node names for the ranks of a round; empty if all of the job's nodes are members.

    `members` are the node ranks of the round, in the order of its ranks. srun would leave the job's own lists alone,
    but a node that has been lost, or a spare node, may be the first in them.
    """
    if list(members) == list(range(len(hostnames))):
        return {}
    return dict.fromkeys(NODE_LISTS, ",".join(hostnames[node_rank] for node_rank in members))


def task_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the task that a rank would be, from torchrun's variables; empty without srun."""
    if "SLURM_PROCID" not in environment:
        return {}
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    rank, local_rank, tasks, on_node, node, nodes = (int(environment[name]) for name in names)
    first = rank - local_rank
    per_node = str(on_node) if nodes == 1 else f"{on_node}(x{nodes})"
    variables = {
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": local_rank,
        "SLURM_NODEID": node,
        "SLURM_GTIDS": ",".join(str(task) for task in range(first, first + on_node)),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), tasks),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"), nodes),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), per_node),
        "SLURM_NTASKS_PER_NODE": on_node,
    }
    # The CPUs of the agent's task are those of all ranks on the node: many scripts start so many loader workers.
    if cpus := environment.get("SLURM_CPUS_PER_TASK", ""):
        variables["SLURM_CPUS_PER_TASK"] = max(1, int(cpus) // on_node)
    return {name: str(value) for name, value in variables.items()}
