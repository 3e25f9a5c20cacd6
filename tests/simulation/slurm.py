"""A simulated Slurm: what its commands answer, and what becomes of jobs, as measured on the real one.

tests/simulation/test_simulation.py compares it with the testbed's.
"""

import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum

from hpc.base.errors import TorchrelayError
from hpc.slurm.client import SlurmRefusalError
from simulation.network import Network
from simulation.world import EPOCH, Process, World

_SCHEDULE_SECONDS = 0.5
_MIN_JOB_AGE_SECONDS = 300.0
_TIMEOUT_SECONDS = 30.0
_MEAN_ANSWER_SECONDS = 0.03

LOGIN = "login"
"""The host of the controller, on which users type commands."""
_HELD = "job requeued in held state"
_NOTICED_SECONDS = 6.0
"""The agents of a job know of a dead node after this time."""


class State(StrEnum):
    """The states of a job, in Slurm's words."""

    PENDING = "PENDING"
    EXPEDITING = "EXPEDITING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    PREEMPTED = "PREEMPTED"
    NODE_FAIL = "NODE_FAIL"


@dataclass(kw_only=True)
class Configuration:
    """A cluster's configuration."""

    nodes: tuple[str, ...]
    slurmd_timeout: float = 30.0
    """Seconds until a dead node is marked down."""
    kill_wait: float = 30.0
    requeue_delay: float = 120.0
    preempt_mode: str = "REQUEUE"
    grace_seconds: float = 0.0
    may_requeue: bool = True
    expedites: bool = False
    """Whether it is a Slurm since 25.11 that requeues jobs of `sbatch --requeue=expedite` without a delay."""
    has_delay_setting: bool = False
    """Whether the delay is the setting of 25.11, `requeue_delay`; before, it was `cred_expire`."""


@dataclass(kw_only=True, eq=False)
class Job:
    """A job of the user."""

    id: str
    script: str
    nodes: tuple[int, int]
    """The fewest and the most nodes."""
    limit: float
    lead: float
    """When the signal comes (`--signal`), in seconds before the time limit."""
    excluded: tuple[str, ...] = ()
    dependency: tuple[str, ...] = ()
    state: State = State.PENDING
    reason: str = "None"
    eligible: float = 0.0
    hosts: list[str] = field(default_factory=list)
    batch_host: str = ""
    started: float | None = None
    ended: float | None = None
    restarts: int = 0
    preempted_at: float | None = None
    becomes: State = State.COMPLETED
    """The state after COMPLETING."""
    delay: float = 0.0
    killed_at: float = 0.0
    """When the processes of a job that is COMPLETING are killed."""
    held: bool = False
    expedited: bool = False
    """Whether it was submitted with --requeue=expedite."""
    ends: bool = False
    """Whether it ends if its script fails, though it is expedited (`scontrol update Requeue=0`)."""
    processes: list[Process] = field(default_factory=list)
    warned: bool = False
    early: float = 0.0
    """How much earlier than that the signal comes, as sbatch's manual allows: up to a minute."""

    @property
    def alive(self) -> bool:
        """Whether Slurm still holds the job."""
        return self.waits or self.state in {State.RUNNING, State.COMPLETING}

    @property
    def waits(self) -> bool:
        """Whether it waits for its start."""
        return self.state in {State.PENDING, State.EXPEDITING}


class Slurm:
    """The controller and the daemons of the nodes."""

    def __init__(
        self, world: World, network: Network, configuration: Configuration, launch: Callable[[Job], Process],
        shape: Callable[[str], tuple[tuple[int, int], float, float]],
    ) -> None:  # fmt: skip
        self.world, self._network, self.configuration = world, network, configuration
        self._launch = launch
        """Starts the batch script of a job."""
        self._shape = shape
        """Returns the nodes, time limit and signal lead of a script's job."""
        self.jobs = dict[str, Job]()
        self.dead = dict[str, float]()
        """When a host died."""
        self.missed = set[str]()
        """Those of them on which an agent ran: others miss it."""
        self.unreachable = dict[str, float]()
        """Since when the controller does not reach a host that runs."""
        self.down = set[str]()
        self.strays = list[Process]()
        """Processes of jobs that have ended without the controller reaching their host."""
        self.away_until = 0.0
        """The controller does not answer before this time."""
        self.lose_replies_of = set[str]()
        """The next of these commands is carried out, and times out."""
        self.refuse = Counter[str]()
        """Commands that are refused, and how often."""
        self._next = 1
        process = Process(world, "controller", "slurmctld", 1)
        world.spawn(process, self._keep_scheduling)

    # --- the controller ---

    def _keep_scheduling(self) -> None:
        while True:
            self.world.wait(_SCHEDULE_SECONDS)
            self._notice_unreachable_nodes()
            self._notice_dead_nodes()
            for job in list(self.jobs.values()):
                if job.state is State.RUNNING:
                    self._watch_limit(job)
                elif job.state is State.COMPLETING:
                    self._complete(job)
            if self.away_until <= self.world.now:
                for job in sorted(self.jobs.values(), key=lambda each: int(each.id)):
                    if job.waits:
                        self._try_to_start(job)

    def _notice_unreachable_nodes(self) -> None:
        for host in self.configuration.nodes:
            if self._network.is_cut(LOGIN, host):
                self.unreachable.setdefault(host, self.world.now)
            elif self.unreachable.pop(host, None) is not None:
                self.down.discard(host)
                for process in [each for each in self.strays if each.host == host]:
                    process.end(137)

    def _notice_dead_nodes(self) -> None:
        for host, died in {**self.unreachable, **self.dead}.items():
            if host in self.down or self.world.now - died < self.configuration.slurmd_timeout:
                continue
            self.down.add(host)
            self.world.tell(f"Slurm marks {host} down")
            for job in self.jobs.values():
                if host not in job.hosts or job.state is not State.RUNNING:
                    continue
                if job.nodes[1] > 1:
                    job.hosts.remove(host)  # --no-kill
                    self.strays += [each for each in job.processes if each.host == host]
                    job.processes = [each for each in job.processes if each.host != host]
                if (job.nodes[1] == 1 or not job.hosts) and job.ends:
                    self._end(job, State.NODE_FAIL, reason="NodeDown")
                elif job.nodes[1] == 1 or not job.hosts:
                    self._end(job, State.EXPEDITING if job.expedited else State.PENDING, restart=True)

    def _watch_limit(self, job: Job) -> None:
        assert job.started is not None
        left = job.started + job.limit - self.world.now
        if left <= job.lead + job.early and not job.warned:
            job.warned = True
            self.signal([job], signal.SIGUSR2)
        if left <= 0:
            self.world.tell(f"job {job.id} reaches its time limit")
            self._end(job, State.TIMEOUT, reason="TimeLimit")

    def _taken_hosts(self) -> set[str]:
        """Return the hosts that jobs have."""
        holding = {State.RUNNING, State.COMPLETING}
        return {host for job in self.jobs.values() if job.state in holding for host in job.hosts}

    def _try_to_start(self, job: Job) -> None:
        if job.held or job.eligible > self.world.now or self._waits(job):
            return
        job.reason = "Resources"
        barred = {*job.excluded, *self._taken_hosts(), *self.down, *self.dead, *self.unreachable}
        free = [host for host in self.configuration.nodes if host not in barred]
        fewest, most = job.nodes
        if len(free) < fewest:
            return
        job.hosts = free[:most]
        job.batch_host = job.hosts[0]
        job.state, job.reason, job.started, job.ended = State.RUNNING, "None", self.world.now, None
        job.processes, job.warned, job.early = [], False, self.world.random.uniform(0.0, 60.0)
        self.world.tell(f"job {job.id} starts on {','.join(job.hosts)} (restart {job.restarts})")
        script = self._launch(job)
        job.processes.append(script)
        start = job.restarts

        def has_ended() -> None:
            if job.state is State.RUNNING and job.restarts == start and script.host in {*job.hosts} - {*self.dead}:
                code = script.exit_code or 0
                by_signal = "RaisedSignal:9(Killed)" if self.configuration.has_delay_setting else "JobLaunchFailure"
                reason = {0: "None", 137: by_signal}.get(code, "NonZeroExitCode")
                if code not in {0, 137} and job.expedited and not job.ends:
                    job.held = True
                    self._end(job, State.PENDING, restart=True)
                    return
                self._end(job, State.COMPLETED if code == 0 else State.FAILED, reason=reason)

        script.on_end.append(has_ended)

    def _waits(self, job: Job) -> bool:
        waits = any(self.jobs[one].alive for one in job.dependency if one in self.jobs)
        if waits:
            job.reason = "Dependency"
        return waits

    def _end(
        self, job: Job, state: State, *, restart: bool = False, reason: str = "None", wait: float | None = None
    ) -> None:
        """End the processes of a job, which then gets the state."""
        if job.waits:
            job.state, job.ended = state, self.world.now
            return
        wait = self.configuration.kill_wait if wait is None else wait
        job.state, job.becomes = State.COMPLETING, state
        job.reason = _HELD if job.held else reason
        job.restarts += restart
        job.delay = self.configuration.requeue_delay if restart and not job.expedited else 0.0
        self.signal([job], signal.SIGTERM)
        job.killed_at = self.world.now + wait

    def signal(self, jobs: Sequence[Job], number: int) -> None:
        """Send a signal to all processes of jobs that the controller reaches."""
        for process in [process for job in jobs for process in job.processes]:
            if process.alive and process.handle and process.host not in self.unreachable:
                process.handle(number)

    def _complete(self, job: Job) -> None:
        """Let a job end whose processes have ended; a dead node keeps it COMPLETING until it is marked down."""
        for process in list(job.processes) if self.world.now >= job.killed_at else ():
            if process.host not in self.unreachable:
                process.end(137)
        left = [process for process in job.processes if process.alive]
        if any(each.host not in self.down for each in left) or any(
            host in self.dead and host not in self.down for host in job.hosts
        ):
            return
        self.strays += left
        job.state, job.hosts, job.processes = job.becomes, [], []
        job.ended = self.world.now
        if job.waits:
            reason = "BeginTime" if job.delay else "None"
            job.eligible, job.reason = self.world.now + job.delay, _HELD if job.held else reason
        self.world.tell(f"job {job.id} is {job.state}")

    # --- failures ---

    def kill_host(self, host: str, *, has_agent: bool) -> None:
        """Cut the power of a host, on which an agent may run."""
        self.dead[host] = self.world.now
        if has_agent:
            self.missed.add(host)

    def revive_host(self, host: str) -> None:
        """Bring a host back: its daemon registers with the controller."""
        if host in self.dead:
            if host not in self.down:  # a daemon that restarts before its node was marked down fails the node's jobs
                self.dead[host] = self.world.now - self.configuration.slurmd_timeout
                self._notice_dead_nodes()
            del self.dead[host]
            self.missed.discard(host)
            self.down.discard(host)

    def preempt(self, job: Job) -> None:
        """Preempt a running job."""
        if job.state is not State.RUNNING:
            return
        job.preempted_at = self.world.now
        grace = self.configuration.grace_seconds
        requeues = self.configuration.preempt_mode == "REQUEUE"
        state = State.PENDING if requeues else State.PREEMPTED
        self.world.tell(f"job {job.id} is preempted ({self.configuration.preempt_mode}, grace {grace:g} s)")
        self._end(job, state, restart=requeues, wait=grace or self.configuration.kill_wait)

    # --- the commands ---

    def complete(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Carry out a command as hpc.slurm.client.complete does."""
        try:
            return subprocess.CompletedProcess(command, 0, self.run(*command), "")
        except TorchrelayError as error:
            if "did not answer" in str(error):
                raise
            return subprocess.CompletedProcess(command, 1, "", str(error))

    def run(self, *command: str) -> str:
        """Carry out a command as hpc.slurm.client.run does."""
        world = self.world
        command = (command[0].rpartition("/")[2], *command[1:])
        world.effect()
        if self._network.is_cut(world.process.host, LOGIN):
            world.wait(_TIMEOUT_SECONDS)
            raise TorchrelayError(f"{command[0]} did not answer within 30 s: is slurmctld down?")
        if self.away_until > world.now:
            world.wait(min(_TIMEOUT_SECONDS, self.away_until - world.now))
            if self.away_until > world.now:
                raise TorchrelayError(f"{command[0]} did not answer within 30 s: is slurmctld down?")
        world.wait(world.random.expovariate(1 / _MEAN_ANSWER_SECONDS))
        key = " ".join(command[:2]) if command[0] == "scontrol" else command[0]
        if self.refuse[key] > 0:
            self.refuse[key] -= 1
            raise SlurmRefusalError(f"{key}: Requested operation is presently disabled")
        answer = self._answer(command)
        if command[0] in self.lose_replies_of:
            self.lose_replies_of.clear()
            world.tell(f"{' '.join(command[:3])} is carried out, and its reply is lost")
            world.wait(_TIMEOUT_SECONDS)
            raise TorchrelayError(f"{command[0]} did not answer within 30 s: is slurmctld down?")
        world.wait(world.random.expovariate(1 / _MEAN_ANSWER_SECONDS))
        return answer

    def _answer(self, command: Sequence[str]) -> str:
        verbs: dict[tuple[str, ...], Callable[..., str | None]] = {
            ("squeue",): self._queue,
            ("sinfo",): self._nodes,
            ("sbatch",): self._submit,
            ("scancel",): lambda job_id: self._cancel(self._job(job_id)),
            ("scontrol", "show", "hostnames"): lambda nodes: "\n".join(nodes.split(",")),
            ("scontrol", "show", "config"): self._config,
            ("scontrol", "--oneliner", "show", "job"): lambda job_id: self._show(self._job(job_id)),
            ("scontrol", "--oneliner", "show", "partition"): self._partition,
            ("scontrol", "requeue"): lambda job_id: self._requeue(self._job(job_id), hold=False),
            ("scontrol", "requeuehold"): lambda job_id: self._requeue(self._job(job_id), hold=True),
            ("scontrol", "release"): lambda job_id: setattr(self._job(job_id), "held", False),
            ("scontrol", "update"): self._update,
            ("sacct",): self._no_accounting,
        }
        for words, answer in verbs.items():
            if tuple(command[: len(words)]) == words:
                return answer(*command[len(words) :]) or ""
        raise AssertionError(f"the simulated Slurm does not know {' '.join(command)}")

    def _config(self) -> str:
        seconds, expedites = f"{self.configuration.requeue_delay:.0f}", self.configuration.expedites
        delay = f"AuthInfo = cred_expire={seconds}\nJobContainerType = (null)\n"
        if self.configuration.has_delay_setting:
            delay = f"AuthInfo = (null)\nSchedulerParameters = requeue_delay={seconds}\nNamespaceType = (null)\n"
        delay += f"KillWait = {self.configuration.kill_wait:.0f} sec\n"
        return f"{delay}SlurmctldParameters = {'enable_expedited_requeue' if expedites else '(null)'}\n"

    def _nodes(self, *options: str) -> str:
        partition = "gpu*|" if options[-1] == "--format=%N|%P|%T" else ""
        return "".join(f"{host}|{partition}{self._node_state(host)}\n" for host in self.configuration.nodes)

    def _partition(self, name: str) -> str:
        mode, grace = self.configuration.preempt_mode, self.configuration.grace_seconds
        return f"PartitionName={name} PreemptMode={mode} GraceTime={grace:.0f}"

    @staticmethod
    def _no_accounting(*_: str) -> None:
        raise TorchrelayError("Slurm accounting storage is disabled")

    def _listed(self) -> list[Job]:
        now = self.world.now
        return [
            job
            for job in self.jobs.values()
            if job.ended is None or job.alive or now - job.ended < _MIN_JOB_AGE_SECONDS
        ]

    def _job(self, job_id: str) -> Job:
        if job_id not in self.jobs or self.jobs[job_id] not in self._listed():
            raise TorchrelayError("Invalid job id specified")
        return self.jobs[job_id]

    def _queue(self, *options: str) -> str:
        listed = self._listed()
        if options[-1] == "--format=%r":
            return "".join(f"{job.reason}\n" for job in listed if job.waits)
        if options[-1] == "--format=%i|%E":
            pending = (job for job in listed if job.waits and job.dependency)
            return "".join(f"{job.id}|{':'.join(['afterany', *job.dependency])}(unfulfilled)\n" for job in pending)
        return "".join(map(self._queue_line, listed))

    def _queue_line(self, job: Job) -> str:
        words = (
            job.id, job.state, job.reason, ",".join(job.hosts), job.batch_host, str(job.restarts),
            _at(job.eligible), _at(job.started), job.script,
        )  # fmt: skip
        return "|".join(words) + "|\n"

    def _node_state(self, host: str) -> str:
        if host in self.down:
            return "down*"
        if host in self.dead and self.world.now - self.dead[host] > self.configuration.slurmd_timeout / 2:
            return "allocated*"
        return "allocated" if host in self._taken_hosts() else "idle"

    def _submit(self, *words: str) -> str:
        *options, script = words
        given = dict(option.split("=", 1) for option in options if "=" in option)
        nodes, limit, lead = self._shape(script)
        excluded = tuple(filter(None, given.get("--exclude", "").split(",")))
        if len(set(self.configuration.nodes) - set(excluded)) < nodes[0]:
            raise TorchrelayError("Requested node configuration is not available")
        expedited = given.get("--requeue") == "expedite"
        if expedited and not self.configuration.expedites:
            raise SlurmRefusalError("Requested operation not supported on this system")
        depends = tuple(one for one in given.get("--dependency", "").split(":")[1:] if one)
        job = Job(
            id=str(self._next), script=script, nodes=nodes, limit=limit, lead=lead, excluded=excluded,
            dependency=depends, eligible=self.world.now, expedited=expedited,
        )  # fmt: skip
        self._next += 1
        self.jobs[job.id] = job
        self.world.tell(f"job {job.id} is submitted" + (f", without {','.join(excluded)}" if excluded else ""))
        return f"{job.id}\n"

    def _cancel(self, job: Job) -> None:
        if not job.alive:
            return
        if job.state is State.COMPLETING:
            job.becomes = State.CANCELLED
            return
        self.world.tell(f"job {job.id} is cancelled")
        self._end(job, State.CANCELLED)

    def _requeue(self, job: Job, *, hold: bool) -> None:
        if not self.configuration.may_requeue or job.ends:
            raise SlurmRefusalError("Requested operation is presently disabled")
        if job.waits or (job.state is State.COMPLETING and job.becomes in {State.PENDING, State.EXPEDITING}):
            raise TorchrelayError("Job is pending execution")
        typed = self.world.process.name.startswith("scontrol")
        known = {host for host in self.missed if self.world.now - self.dead[host] > self._noticed_after(job, host)}
        if (
            not typed
            and not self.configuration.has_delay_setting
            and known.difference(self.down).intersection(job.hosts)
        ):
            self.world.defects.append(
                f"job {job.id} was requeued while {job.hosts} had a dead node: Slurm 22.05 leaks GPUs"
            )
        job.held = hold
        self.world.tell(f"job {job.id} is requeued")
        if job.state in {State.RUNNING, State.COMPLETING}:
            self._end(job, State.PENDING, restart=True)
            return
        job.restarts += 1
        job.state, job.reason, job.eligible = State.PENDING, "None", self.world.now
        if not job.expedited:
            job.reason, job.eligible = "BeginTime", self.world.now + self.configuration.requeue_delay

    def _noticed_after(self, job: Job, host: str) -> float:
        """Seconds after which the agent that asks can know of a dead node, unless its agent had left before.

        Only the first node's agent is connected to all others; another one knows of these what Slurm says.
        """
        connected = job.batch_host in {self.world.process.host, host}
        return _NOTICED_SECONDS if connected else self.configuration.slurmd_timeout / 2 + _NOTICED_SECONDS

    def _update(self, which: str, change: str) -> None:
        job, (name, value) = self._job(which.partition("=")[2]), change.split("=", 1)
        pending = job.state is State.PENDING or (job.state is State.COMPLETING and job.becomes is State.PENDING)
        if job.state is State.EXPEDITING:
            raise SlurmRefusalError("Requested operation not supported on this system")
        if name in {"StartTime", "Dependency", "ExcNodeList"} and not pending:
            raise TorchrelayError("Job is no longer pending execution")
        if name == "StartTime":
            job.eligible = self.world.now + float(value.removeprefix("now+"))
        elif name == "Dependency":
            job.dependency = tuple(one for one in value.split(":")[1:] if one)
        elif name == "Requeue":
            job.ends = value == "0"
        elif name == "ExcNodeList":
            job.excluded = tuple(filter(None, value.split(",")))

    def _show(self, job: Job) -> str:
        preempted = "None" if job.preempted_at is None else _at(job.preempted_at)
        return (
            f"JobId={job.id} JobState={job.state} Reason={job.reason} Restarts={job.restarts} "
            f"PreemptTime={preempted} StartTime={_at(job.started)} ExpeditedRequeue={'Yes' if job.expedited else 'No'} "
            f"ExcNodeList={','.join(job.excluded) or '(null)'}"
        )


def _at(seconds: float | None) -> str:
    if seconds is None:
        return "N/A"
    return f"{datetime.fromtimestamp(int(EPOCH + seconds), UTC):%Y-%m-%dT%H:%M:%S}"
