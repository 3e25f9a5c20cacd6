"""An attempt that has just ended, as an agent sees it, and a Slurm that answers as a test says."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from hpc.run.causes import Cause
from hpc.run.events import ledger
from hpc.run.events.attempts import attempts_of
from hpc.run.events.kinds import AttemptEnded, Event, Interrupted
from hpc.run.nodedir import NodeDir
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from jobs import ending
from jobs.control.coordinator import Coordinator
from jobs.control.messages import Phase
from jobs.node_attempt import NodeAllocation, NodeAttempt
from jobs.stop_request import StopRequest
from support.cluster import Command
from support.events import claimed, of_training, record_of, resources_of, script_spec, write_events
from support.reported_nodes import ReportedNodes
from training.config.train_config import TrainConfig

HOSTS = ("gpu01", "gpu02", "gpu03")
TRAINING = of_training(TrainConfig(synthetic=True))
RUNNING = "JobState=RUNNING Restarts=0 Reason=None"


class AnsweringSlurm:
    """Slurm's answers; what it was asked to do is in `asked`."""

    def __init__(self, command: Command, path: Path) -> None:
        self._command, self._log = command, path / "asked"
        self._log.touch()
        for name, answer in {"scancel": "", "squeue": "", "sbatch": "echo 8"}.items():
            self._command(name, f'echo "{name} $*" >> {self._log}; {answer}')
        self.says_of_job(RUNNING)
        nodes = [f"gpu0{number}" for number in range(1, 6)]
        listed, short = ("\n".join(f"{node}|{form}idle" for node in nodes) for form in ("gpu*|", ""))
        self._command("sinfo", f"case \"$*\" in *%P*) echo '{listed}';; *) echo '{short}';; esac")

    def says_of_job(self, fields: str, requeue_delay: int = 10) -> None:
        """Set the answers to `scontrol show job` and `scontrol show config`."""
        job = f"*show*job*) echo 'JobId=7 {fields}';;"
        config = f"*show*config*) echo 'SchedulerParameters = requeue_delay={requeue_delay}';;"
        shown = f"{job} {config} *show*reservation*) ;;"
        self._command("scontrol", f'case "$*" in {shown} *) echo "scontrol $*" >> {self._log};; esac')

    @property
    def asked(self) -> list[str]:
        """The first two words of each request that changes something."""
        lines = (line.split() for line in self._log.read_text().splitlines())
        return [" ".join(line[:2]) for line in lines if line[0] != "squeue"]


class EndedAttempt:
    """An attempt on three nodes that has just ended, as its first node's agent sees it."""

    def __init__(self, path: Path, *events: Event, local: bool = False, node_rank: int = 0, **spec: Any) -> None:
        settings = {"resources": resources_of(nodes="2:3"), **spec}
        cluster = "local" if local else "slurm"
        self.run = RunDir(path / "r")
        write_events(self.run, claimed(time.time() - 900, nodes=HOSTS), *events, file="attempt-001-node-00.jsonl")
        script_spec(cluster=cluster, **settings).save(self.run)
        self.run.script.write_text("#!/bin/sh\n")
        names = HOSTS if not local else ("localhost",) * 3
        self.node = NodeAttempt(
            run=self.run,
            spec=RunSpec.load(self.run),
            allocation=NodeAllocation(
                cluster=cluster, job_id="7", restart=0, hostnames=names, node_rank=node_rank, cpus=2
            ),
            attempt=attempts_of(ledger.read(self.run.events))[0],
        )
        self.nodes, self.stop = ReportedNodes(3), StopRequest()
        for rank in (1, 2):
            self.nodes.report(rank, phase=Phase.LEFT)
        self.coordinator = Coordinator(self.node, cast("Any", self.nodes), self.stop)
        self.polls = 0
        self.monitor: Any = SimpleNamespace(
            poll=self._poll, node_dir=NodeDir(path / "memory"), last_step=30, counted_steps=None, stop=False
        )

    def _poll(self) -> None:
        """Have the second node's ranks end after a while."""
        self.polls += 1
        if self.polls == 3 and not self.nodes.silent[1]:
            self.nodes.report(1, phase=Phase.LEFT)

    def conclude(self) -> int:
        """Have the first node's agent conclude it."""
        return ending.conclude(self.node, cast("Any", self.nodes), self.monitor, self.coordinator)

    def fails(self, cause: Cause = Cause.CRASHED, **fields: Any) -> None:
        """Have the coordinator end the attempt for this failure."""
        usual = {"failed_at": 50.0, "noticed_at": 51.0, "step": 20, "detail": "x", "rank": 1, "node": "gpu02"}
        self.coordinator.failure = Interrupted(cause=cause, **{**usual, "signature": "s", **fields})

    @property
    def end(self) -> dict[str, Any]:
        """What is recorded of the end, without what every event has; of what is not known, the step alone."""
        [event] = self.node.history().during(1).of(AttemptEnded)
        known = {name: value for name, value in record_of(event).items() if value is not None or name == "step"}
        return {name: value for name, value in known.items() if name not in {"time", "event", "attempt"}}

    def continued(self) -> list[str]:
        """The events that say how the run goes on."""
        kinds = ("requeued", "resubmitted", "excluded", "not_continued")
        return [event.kind for event in self.node.history().events if event.kind in kinds]


EndedAttemptMaker = Callable[..., EndedAttempt]
