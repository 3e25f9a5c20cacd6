"""Slurm's variables of the ranks. tests/runs/test_script_cluster.py compares them with srun's own."""

from jobs.ranks.slurm_variables import node_lists, task_variables

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2",
    "GROUP_WORLD_SIZE": "3",
}  # fmt: skip


def test_node_lists_begin_with_the_node_of_rank_0() -> None:
    nodes = ("gpu01", "gpu02", "gpu03")
    assert node_lists(nodes, (0, 1, 2)) == {}, "Slurm's own are right"
    without_the_first = node_lists(nodes, (2, 1))
    assert set(without_the_first) == {"SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST"}
    assert set(without_the_first.values()) == {"gpu03,gpu02"}


def test_rank_gets_variables_of_slurm_only_under_srun() -> None:
    assert task_variables({**TORCHRUN, "SLURM_NTASKS": "1"}) == {}, "as in the shell of salloc"
    task = task_variables({**TORCHRUN, "SLURM_PROCID": "0", "SLURM_CPUS_PER_TASK": "7"})
    assert (task["SLURM_PROCID"], task["SLURM_GTIDS"], task["SLURM_TASKS_PER_NODE"]) == ("5", "4,5", "2(x3)")
    assert task["SLURM_CPUS_PER_TASK"] == "3"
    assert "SLURM_CPUS_PER_TASK" not in task_variables({**TORCHRUN, "SLURM_PROCID": "0"})
