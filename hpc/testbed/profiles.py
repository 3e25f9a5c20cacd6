"""Kinds of cluster that a testbed can be: what differs in the configuration. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ProfileName = Literal["usual", "typed", "bare", "cancel", "suspend", "strict"]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A kind of cluster."""

    slurm_conf: Mapping[str, str] = field(default_factory=dict)
    """Values of slurm.conf instead of the usual ones."""
    gpu_partition: Mapping[str, str] = field(default_factory=dict)
    """The same for the preemptable partition."""
    gpu_types: tuple[str | None, ...] = ("",)
    """Of the first node's GPUs, the second's, and so on, from the beginning again; empty: GPUs without a type; None: no
    GPUs."""
    slurmd_timeout: int = 20
    """Unless the shape says otherwise."""
    account: Mapping[str, str] = field(default_factory=dict)
    """Limits of the account `users`, with which accounting runs."""
    job_submit: str = ""
    """The site's job_submit.lua."""


# Slurm asks no plugin about a requeue, but one can make every job one that may not be requeued.
_NO_REQUEUE_NO_UPDATE = """\
function slurm_job_submit(job, partitions, user)
   job.requeue = 0
   return slurm.SUCCESS
end
function slurm_job_modify(job, old, partitions, user)
   return slurm.ESLURM_ACCESS_DENIED
end
"""

PROFILES: dict[ProfileName, Profile] = {
    "usual": Profile(),
    "typed": Profile(slurm_conf={"SelectTypeParameters": "CR_CPU"}, gpu_types=("a100", "a100", "h100", None)),
    "bare": Profile(
        slurm_conf={"JobRequeue": "0"},
        gpu_partition={"GraceTime": "0", "MaxTime": "00:05:00", "DefaultTime": "00:02:00"},
        slurmd_timeout=300,
    ),
    "cancel": Profile(slurm_conf={"PreemptMode": "CANCEL"}, gpu_partition={"PreemptMode": "CANCEL"}),
    # FORCE: without it no two jobs share a node, and none can be suspended for the other.
    "suspend": Profile(
        slurm_conf={"PreemptMode": "SUSPEND,GANG"},
        gpu_partition={"PreemptMode": "SUSPEND", "GraceTime": "0", "OverSubscribe": "FORCE:1"},
    ),
    "strict": Profile(
        slurm_conf={"AccountingStorageEnforce": "associations,limits,qos", "JobSubmitPlugins": "lua"},
        account={"MaxSubmitJobs": "1"},
        job_submit=_NO_REQUEUE_NO_UPDATE,
    ),
}
