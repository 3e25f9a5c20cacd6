"""What one run has learned about a node spares the next one, on the real Slurm."""

import pytest
from support.cluster import Site, add_script, submit_and_wait

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
NODE = "gpu01"
FLAGS = ("--nodes=1", "--gpus-per-node=0", "--cpus-per-gpu=1")


def test_a_node_that_fails_the_check_of_one_run_is_left_out_and_avoided_by_the_next(site: Site) -> None:
    add_script(site, "prints.py", "print('done')\n")
    script = ("--", "prints.py")
    check = f"echo checked $SLURMD_NODENAME; [ $SLURMD_NODENAME != {NODE} ]"
    first = submit_and_wait(site, "--nodes=2", *FLAGS[1:], f"--health-check={check}", "--name=first", *script)
    status = first.status()
    failed, completed = status["attempts"]
    assert (status["state"], failed["cause"], NODE in failed["nodes"]) == ("completed", "bad_node", True)
    assert f"failed on {NODE} with exit code 1" in failed["detail"]
    assert NODE not in completed["nodes"]
    printed = site.hpc("logs", "first", "--all").stdout
    assert all(f"checked {node}" in printed for node in {NODE, *completed["nodes"]})

    reason = f"{NODE} (bad_node in run first, "
    expected = site.hpc("submit", "--dry-run", *FLAGS, *script)
    assert reason in expected.stderr
    assert f" on {NODE}" not in expected.stderr
    assert reason in site.hpc("doctor").stdout
    second = submit_and_wait(site, *FLAGS, "--name=second", *script)
    assert NODE not in second.status()["attempts"][0]["nodes"]

    wants_it = site.hpc("submit", *FLAGS, "--sbatch=nodelist=gpu01", "--name=wants-it", "--wait", *script)
    assert wants_it.returncode == 0, wants_it.stderr
    assert reason not in wants_it.stderr, "the user asks for this node"

    for path in (site.path / "runs").glob(".bad-node.*"):
        path.unlink()
    third = submit_and_wait(site, *FLAGS, "--name=third", *script)
    assert third.status()["attempts"][0]["nodes"] == [NODE]
