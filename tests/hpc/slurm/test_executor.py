"""What sbatch and srun are told: pure, so no cluster is needed."""

from typing import Any

import pytest

from hpc.slurm.executor import sbatch_parameters
from hpc.spec import Recovery, Resources, RunSpec


def told(nodes: str, **recovery: Any) -> dict[str, Any]:
    resources = Resources(nodes=nodes, gpus_per_node=2, cpus_per_gpu=3, time="2h")
    spec = RunSpec(
        name="r", cluster="slurm", data=None, stage_dir="/tmp", resources=resources, recovery=Recovery(**recovery)
    )
    return sbatch_parameters(spec)


def test_slurm_requeues_a_job_of_one_node() -> None:
    parameters = told("1")
    assert "no-kill" not in parameters["additional_parameters"]
    assert "--kill-on-bad-exit=1" in parameters["srun_args"]


@pytest.mark.parametrize(("nodes", "spares"), [("2", 0), ("1:2", 0), ("1", 1)])
def test_job_of_several_nodes_survives_a_lost_node(nodes: str, spares: int) -> None:
    parameters = told(nodes, spares=spares)
    assert parameters["additional_parameters"]["no-kill"] is True
    assert {"--no-kill", "--kill-on-bad-exit=0"} <= set(parameters["srun_args"])


def test_spares_are_additional_nodes_of_the_job() -> None:
    assert told("2:4", spares=1)["additional_parameters"]["nodes"] == "3-5"
    fixed = told("2", spares=1)
    assert (fixed["nodes"], "nodes" in fixed["additional_parameters"]) == (3, False)


def test_signal_is_sent_stop_lead_before_the_limit() -> None:
    assert told("2")["signal_delay_s"] == 300
    assert told("2", stop_lead="20m")["signal_delay_s"] == 1200
