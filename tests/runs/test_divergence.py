"""A loss that is not finite, on the real Slurm: the training has diverged, or a device computes wrongly."""

import pytest
from support.cluster import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
FLAGS = (
    "--data=data", "--nodes=1", "--gpus-per-node=1", "--cpus-per-gpu=1", "--device=cpu", "--batch-size=16",
    "--epochs=3", "--log-every=5", "--snapshot-every=1",
)  # fmt: skip


def test_a_device_that_computes_wrongly_is_named_and_avoided(site: Site) -> None:
    # Only the first start of the ranks of each round has the fault, and the second round has no rank 1.
    run = site.submit(*FLAGS[:1], "--nodes=1:2", *FLAGS[2:], "--name=disturbed", TORCHRELAY_FAULT="loss@14:1")
    bad = run.wait_for_state("completed")["attempts"][0]["nodes"][1]
    first, second = run.events("interruption")
    assert (first["cause"], second["cause"]) == ("diverged", "bad_node")
    assert (
        "rank 1 probably computes wrongly: its loss in step 14 was nan, and finite when the step was"
        in second["detail"]
    )
    assert (second["node"], second["step"] >= 14) == (bad, True)
    assert f"the job avoids {bad} (bad_node in run disturbed" in site.hpc("submit", *FLAGS).stderr
