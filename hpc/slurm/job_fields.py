"""What the fields of `scontrol show job` say. Runs on compute nodes."""

from hpc.base.units import slurm_seconds
from hpc.run.causes import JobState
from hpc.slurm.client import Fields
from hpc.slurm.squeue import job_state

# How a COMPLETING job ends, by Slurm's reason. A job whose batch script was killed has the reason JobLaunchFailure in
# Slurm 22.05.8, and RaisedSignal in 26.05.5.
_ENDING_REASONS = {
    "TimeLimit": JobState.TIMEOUT, "JobLaunchFailure": JobState.FAILED, "NonZeroExitCode": JobState.FAILED,
    "RaisedSignal": JobState.FAILED,
}  # fmt: skip


def ending_state(fields: Fields, restart: int) -> JobState:
    """Return the state in which a job ends, from its fields. `restart` is its restart count when the attempt began.

    While its processes end, every job is COMPLETING. Then a higher restart count means a requeue, and the reason shows
    a time limit or a failed batch script. In all other cases the job was cancelled.
    """
    state = job_state(fields.get("JobState", ""))
    if state is not JobState.ENDING:
        return state
    if int(fields.get("Restarts", "0")) > restart:
        return JobState.PENDING
    reason = fields.get("Reason", "").partition(":")[0]  # RaisedSignal:9(Killed)
    return _ENDING_REASONS.get(reason, JobState.CANCELLED)


def is_preempted(fields: Fields) -> bool:
    """Return whether a job's fields show a preemption since its last start. slurmctld's clock sets both times."""
    preempted = fields.get("PreemptTime", "None")
    return preempted not in {"None", "N/A", ""} and preempted >= fields.get("StartTime", "")


def is_expedited(fields: Fields) -> bool:
    """Return whether Slurm requeues a job without a delay, according to the job's fields.

    If the script of such a job fails, Slurm does not end the job, but requeues and holds it (26.05.5).
    """
    return fields.get("ExpeditedRequeue") == "Yes" and fields.get("Requeue") != "0"


def is_shortened(fields: Fields, usual_minutes: int) -> bool:
    """Return whether --time-min has lowered the time limit in a job's fields below the usual one."""
    limit = slurm_seconds(fields.get("TimeLimit", "N/A"))
    return fields.get("TimeMin", "N/A") != "N/A" and limit is not None and limit < 60 * usual_minutes
