"""What one attempt at a training is told. Runs on every rank."""

from dataclasses import dataclass

from hpc.core.nodedir import NodeDir
from hpc.core.rundir import RunDir
from training.config.train_config import TrainConfig
from training.runtime.fault_injection import NO_FAULT, Fault
from training.runtime.heartbeat import SILENT, Heartbeat


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What to train, where its files go, and which attempt this is."""

    config: TrainConfig
    run_dir: RunDir
    attempt: int
    started: float
    """time.monotonic() when the process began."""
    node_dir: NodeDir | None = None
    """What outlives the processes on this node; None: there are no snapshots."""
    fault: Fault = NO_FAULT
    heartbeat: Heartbeat = SILENT
    recipe: str | None = None
    """The recipe that the flags began with."""
