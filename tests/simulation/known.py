"""Defects that the simulation has found, each as the smallest schedule that showed it."""

from hpc.run.spec import Recovery, Resources
from simulation.ranks import Training
from simulation.schedule import Fault, Plan
from simulation.slurm import Configuration

_CLUSTER = Configuration(nodes=("gpu01", "gpu02", "gpu03", "gpu04"), slurmd_timeout=60.0, requeue_delay=30.0)
_TRAINING = Training(total_steps=30, step_seconds=1.0, snapshot_steps=1, checkpoint_steps=10)


def _plan(*faults: Fault, nodes: str = "2") -> Plan:
    return Plan(
        seed=1, configuration=_CLUSTER, resources=Resources(nodes=nodes, partition="gpu", time="600m"),
        recovery=Recovery(hang_timeout="10s"), training=_TRAINING, is_script=True, has_supervisor=False,
        faults=faults,
    )  # fmt: skip


KNOWN = {
    # The agents took the end of the job for a cancellation, and nothing continued the run.
    "the batch script is killed": _plan(Fault(at=20.0, kind="kill-script")),
    # Its job went on without a single process until its time limit.
    "the head node dies between the last step and the record of the end": _plan(
        Fault(at=36.2, kind="kill-host", host="gpu01")
    ),
    # The same: the other agents only said that they could not reach the head node's.
    "the head node dies before the others have reached it": _plan(Fault(at=1.0, kind="kill-host", host="gpu01")),
    # The other agents deleted their snapshots, because the job was ending.
    "the job is requeued while its head node is dead": _plan(
        Fault(at=20.0, kind="kill-host", host="gpu01"), Fault(at=22.0, kind="requeue")
    ),
    # A job that started while its storage failed was over at once, and the run with it.
    "the storage fails while the agents start": _plan(
        Fault(at=0.8, kind="storage-fails", host="gpu01", seconds=40.0), nodes="1"
    ),
    # The ranks that agents kill for a pause counted as a further failure, and used up the budget.
    "two failures without progress": _plan(
        Fault(at=18.0, kind="killed", host="gpu02"), Fault(at=19.0, kind="crash", host="gpu01")
    ),
}
"""What goes wrong, and the schedule."""
