"""What sbatch 22.05 printed, and what the wrappers of sites make of it."""

from pathlib import Path

import pytest
from support.cluster import Command

from hpc.base.errors import TorchrelayError
from hpc.slurm import submission
from hpc.slurm.submission import StartEstimate, parse_estimate, refusal

MESSAGE = """\
sbatch: Welcome to the cluster
sbatch: error: Give an --account
sbatch: error: Batch job submission failed: Unspecified error
"""


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("sbatch: unrecognized option '--a=b'\nTry \"sbatch --help\" for more\n", "unrecognized option '--a=b'"),
        ("allocation failure: Invalid feature specification\n", "Invalid feature specification"),
        (MESSAGE, "Give an --account; Unspecified error"),
        ("", ""),
    ],
)
def test_refusal(printed: str, reason: str) -> None:
    assert refusal(printed) == reason


def test_estimate() -> None:
    printed = "sbatch: Job 1 to start at 2026-11-23T03:27:35 using 2 processors on nodes gpu[01-02] in partition gpu\n"
    assert parse_estimate(printed) == StartEstimate(time="2026-11-23T03:27:35", nodes="gpu[01-02]")
    assert parse_estimate("allocation failure: Invalid feature specification\n") is None


# A job of the same script, of a run of the same name that was deleted.
EARLIER = "7|COMPLETED|None||n/a|0|N/A|N/A|{}|"
BANNER = "Project 4000: 12 of 250 node hours are left"
REPLY = "Submitted batch job 8"


@pytest.fixture
def queued(tmp_path: Path, slurm_command: Command) -> Path:
    """A script; squeue lists the job with the id in the file `queued` beside it, once it is there."""
    script = tmp_path / "submit.sbatch"
    lines = f"echo '{EARLIER.format(script)}'; sed 's#$#|PENDING|None||n/a|0|N/A|N/A|{script}|#' {tmp_path}/queued"
    slurm_command("squeue", f"touch {tmp_path}/queued; {lines}")
    return script


@pytest.mark.parametrize(
    "printed",
    [
        f"echo '{BANNER}'; echo 99; echo {REPLY}; echo 'See http://wiki/2026/jobs' >&2",
        "printf '\\033[32mSubmitted batch job \\033[1m8\\033[0m\\n'",
        "echo 'Submitted batch job 5 (staging of data)'; echo Submitted batch job 8",
        "echo 4000",
        f"echo {REPLY}; exit 1",
        "echo 'sbatch: error: 1 warning' >&2; exit 1",
    ],
)
def test_job_is_found_whatever_a_site_prints(queued: Path, slurm_command: Command, printed: str) -> None:
    slurm_command("sbatch", f"echo 8 > {queued.parent}/queued; {printed}")
    assert submission.submit(queued, []) == "8"


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ("echo 'Limit of 4000 hours used up'", "queued no job. It printed 'Limit of 4000 hours used up'"),
        ("printf '12\\n4000\\n'", "queued no job. It printed '12 4000'"),
        ("exit 3", "exit code 3"),
    ],
)
def test_without_a_job_no_number_is_taken_for_one(
    queued: Path, slurm_command: Command, printed: str, told: str
) -> None:
    slurm_command("sbatch", printed)
    with pytest.raises(TorchrelayError, match=told):
        submission.submit(queued, [])


@pytest.mark.parametrize("printed", [f"echo '{BANNER}'; echo {REPLY}", "echo '8;cluster'"])
@pytest.mark.parametrize("squeue", ["exit 0", "exit 1"])
def test_reply_counts_if_squeue_lists_no_new_job(
    queued: Path, slurm_command: Command, squeue: str, printed: str
) -> None:
    slurm_command("squeue", squeue)
    slurm_command("sbatch", printed)
    assert submission.submit(queued, []) == "8"
