"""Requeues a job that has started too early, because its run waits for other runs. Runs on the first node.

A job starts too early if the jobs of the other runs have ended, but those runs go on in new jobs
(hpc.slurm.predecessors).
"""

from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.slurm import client as slurm
from hpc.slurm import squeue
from hpc.slurm.predecessors import dependency, predecessors_of, wait_again
from jobs import claim
from jobs.node_attempt import NodeAllocation, ask_slurm, log

# Longer than a fail-over of Slurm's controller (SlurmctldTimeout, 120 s).
_SLURM_SECONDS = 480.0
# Slurm kills the processes of a requeued job after KillWait, by default 30 s.
_AFTER_REQUEUE_SECONDS = 20.0


def must_wait(run: RunDir, spec: RunSpec, allocation: NodeAllocation) -> bool:
    """Return whether the run must still wait for other runs. If so, this job is requeued and makes no attempt.

    If the wait cannot end, for example because a run that must be complete has failed, the job is held in the queue,
    like a job whose dependency is never satisfied. `hpc resume` of the failed run releases the job.

    Raises:
        TorchrelayError: Slurm does not answer, or refuses to requeue the job.
    """
    if allocation.cluster != "slurm" or not (spec.after or spec.after_ok):
        return False
    jobs = ask_slurm(squeue.jobs, _SLURM_SECONDS)
    waits = [one for one in predecessors_of(run, spec, jobs) if not one.is_over]
    if not waits:
        return False
    job_id, problem = allocation.job_id, next((one.problem for one in waits if one.problem), None)
    reason = problem or f"it waits for {', '.join(f'run {one.run.name}' for one in waits)}"
    claim.defer(run, allocation, reason)
    log(f"this job goes back into the queue: {reason}")
    if problem is None:
        slurm.requeue(job_id)
        ask_slurm(lambda: slurm.update(job_id, Dependency=dependency(run, spec, jobs)), _AFTER_REQUEUE_SECONDS)
    else:
        slurm.requeue_held(job_id)
        # If the other run got a new job before this one was held, release this one to wait for the new job.
        ask_slurm(lambda: wait_again(run, job_id, squeue.jobs(), held=True), _AFTER_REQUEUE_SECONDS)
    return True
