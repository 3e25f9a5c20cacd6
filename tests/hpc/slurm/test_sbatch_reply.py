"""What sbatch 22.05 printed."""

import pytest
from support.events import script_spec

from hpc.run.spec import Resources
from hpc.slurm.sbatch_reply import StartEstimate, parse_estimate, refusal

SPEC = script_spec(resources=Resources(partition="gpu", mem="640G", sbatch=("exclusive",)))


MESSAGE = """\
sbatch: Welcome to the cluster
sbatch: error: Give an --account
sbatch: error: Batch job submission failed: Unspecified error
"""
NO_NODES = "Requested node configuration is not available"
ASKED = "--partition gpu --nodes 1 --gpus-per-node 1 --mem 640G --sbatch exclusive"


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("sbatch: unrecognized option '--a=b'\nTry \"sbatch --help\" for more\n", "unrecognized option '--a=b'"),
        ("allocation failure: Invalid feature specification\n", "Invalid feature specification"),
        (MESSAGE, "Give an --account; Unspecified error"),
        (f"allocation failure: {NO_NODES}\n", f"{NO_NODES}. No nodes fit {ASKED}: ask for less"),
        ("", ""),
    ],
)
def test_refusal(printed: str, reason: str) -> None:
    assert refusal(printed, SPEC) == reason


def test_estimate() -> None:
    printed = "sbatch: Job 1 to start at 2026-11-23T03:27:35 using 2 processors on nodes gpu[01-02] in partition gpu\n"
    assert parse_estimate(printed) == StartEstimate(time="2026-11-23T03:27:35", nodes="gpu[01-02]")
    assert parse_estimate("allocation failure: Invalid feature specification\n") is None
