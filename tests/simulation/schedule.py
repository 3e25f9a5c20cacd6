"""One schedule: a run, the failures that a seed chooses for it, and what must hold all the time and in the end."""

import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from support.events import recovery_of, resources_of

from hpc.base.errors import TorchrelayError
from hpc.base.files import DEV_SHM
from hpc.base.units import NodeRange
from hpc.run.events.history import History
from hpc.run.events.kinds import AttemptEnded, Interrupted, Notifying
from hpc.run.rundir import RunDir
from hpc.run.spec import Notification, Recovery, Resources
from simulation.cluster import NEXT, Cluster
from simulation.ranks import KINDS, PEER_DIED, Training
from simulation.slurm import LOGIN, Configuration, Job, State
from simulation.world import World

HOSTS = ("gpu01", "gpu02", "gpu03", "gpu04", "gpu05")
_FAULTS_SECONDS = 90.0
"""Failures happen within this time."""
_CALM_SECONDS = 3600.0
"""After the last failure, a run must have ended within this time."""
_PATIENCE_SECONDS = 900.0
"""After several failures, a person without a supervisor starts one when the run has not ended after this time."""
_OF_RUN = ("hpc", "agent", "script")
_POLL_SECONDS, _SHORT_SECONDS = 1.0, 0.05
_TWO_JOBS_SECONDS = 150.0
"""A run may have two jobs while one process submits the next job and ends the old one."""
_AFTERWARDS_POLLS, _MOST_TRIES = 25, 5
_CANCELLED_SECONDS, _RECORD_SECONDS = 180.0, 10.0
_LOSE_STATES = (
    "full",
    "storage-fails",
    "storage-hangs",
    "kill-agent",
    "doom-agent",
    "cut",
    "cut-one-way",
    "isolate",
    "suspend",
    "kill-script",
)
"""After these, nobody may be able to save the newest state of a node."""
_OVERLAP_SECONDS, _CUT_OFF_OVERLAP_SECONDS = 3.0, 20.0
"""Ranks of an attempt that has ended may go on for this long: their agents must hear of it, or read it."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong, or that a user types."""

    at: float
    """When, in seconds from the beginning, or from the line of the timeline that `after` names."""
    kind: str
    after: str = ""
    host: str = ""
    other: str = ""
    seconds: float = 0.0
    number: int = 0

    def __str__(self) -> str:
        words = [self.kind, self.host, self.other]
        words += [f"for {self.seconds:.1f} s"] if self.seconds else []
        words += [f"({self.number})"] if self.number else []
        since = f" after {self.after!r}" if self.after else ""
        return f"{self.at:6.1f} s{since}: {' '.join(filter(None, words))}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that a seed decides before the world begins."""

    seed: int
    configuration: Configuration
    resources: Resources
    recovery: Recovery
    training: Training
    is_script: bool
    has_supervisor: bool
    faults: tuple[Fault, ...]
    next_run: str = ""
    """`after` or `after_ok` if another run waits for this one, of one node."""
    notifies: bool = False
    """Whether the user wants messages about the run."""
    nodes_have_internet: bool = True
    is_helped: bool = True
    """Whether a person helps after several failures."""
    outcome: str | None = None
    """How the run must end."""
    attempts: int | None = None
    """How many attempts the run must need."""
    interruptions: int | None = None
    """How many interruptions must be recorded."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a schedule."""

    plan: Plan
    violations: tuple[str, ...]
    timeline: tuple[str, ...]
    state: str
    seconds: float
    """Until the run had ended."""


# --- what a seed decides ---

# Kinds of failure, and how often each is chosen.
_KINDS = {
    "crash": 4, "killed": 4, "hang": 2, "oom": 1, "device": 1,
    "kill-host": 4, "kill-agent": 3, "kill-script": 1, "doom-agent": 3,
    "suspend": 2, "cut": 3, "cut-one-way": 2, "isolate": 2, "clock": 1,
    "preempt": 4, "requeue": 1, "signal": 1,
    "full": 1, "storage-fails": 1, "storage-hangs": 2, "lost-link": 2,
    "controller-away": 2, "lost-reply": 1, "lost-submission": 1, "refuse-requeue": 1, "refuse-sbatch": 1,
    "refuse-update": 1, "kill-supervisor": 1, "cancel": 1, "cancel-and-resume": 1, "resume": 1,
}  # fmt: skip


def plan_of(seed: int) -> Plan:
    """Return the plan of a seed."""
    random = Random(f"plan {seed}")
    limit = Random(f"limit {seed}").choice(("600m", "600m", "600m", "2m"))
    messages, newer = Random(f"messages {seed}"), Random(f"release {seed}")
    nodes = random.choice(("1", "2", "2", "3", "2:3", "1:3"))
    least = int(nodes[0])
    elastic = ":" not in nodes and least > 1 and random.random() < 0.3
    spares = random.choice((0, 0, 0, 1)) if least > 1 else 0
    hosts = HOSTS[: random.randint(least + spares + 1, len(HOSTS))]
    configuration = Configuration(
        nodes=hosts, slurmd_timeout=random.choice((20.0, 60.0, 300.0)), kill_wait=random.choice((5.0, 30.0)),
        requeue_delay=random.choice((2.0, 30.0, 120.0)), preempt_mode=random.choice(("REQUEUE", "REQUEUE", "CANCEL")),
        grace_seconds=random.choice((0.0, 20.0)), may_requeue=random.random() < 0.9,
        has_delay_setting=(is_newer := newer.random() < 0.3), expedites=is_newer and newer.random() < 0.5,
    )  # fmt: skip
    training = Training(
        total_steps=random.randint(20, 60), step_seconds=random.choice((0.5, 1.0, 2.0)),
        snapshot_steps=random.choice((1, 4)), checkpoint_steps=random.choice((10, 1000)),
    )  # fmt: skip
    return Plan(
        seed=seed, configuration=configuration, training=training,
        # A job that has started too early must be requeued.
        next_run=Random(f"next {seed}").choice((*[""] * 8, "after", "after_ok")) if configuration.may_requeue else "",
        resources=resources_of(nodes=nodes, gpus_per_node="1", partition="gpu", time=limit),
        recovery=recovery_of(elastic=elastic, spares=spares, hang_timeout=random.choice(("10s", "30s"))),
        is_script=random.random() < 0.4, has_supervisor=random.random() < 0.5,
        faults=_faults(random, hosts),
        notifies=messages.random() < 0.3, nodes_have_internet=messages.random() < 0.5,
    )  # fmt: skip


def _faults(random: Random, hosts: Sequence[str]) -> tuple[Fault, ...]:
    found = list[Fault]()
    for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        [kind] = random.choices(list(_KINDS), list(_KINDS.values()))
        at = random.uniform(0.0, _FAULTS_SECONDS)
        host, other = random.sample(hosts, 2)
        seconds = random.choice((1.0, 3.0, 8.0, 20.0, 60.0)) * random.uniform(0.5, 1.5)
        if kind == "cancel-and-resume":
            found.append(Fault(at=at, kind="cancel"))
            found.append(Fault(at=at + seconds, kind="resume"))
            continue
        found.append(Fault(at=at, kind=kind, host=host, other=other, seconds=seconds, number=random.randint(1, 40)))
        if kind == "kill-host" and random.random() < 0.7:
            found.append(Fault(at=at + seconds * 5, kind="revive", host=host))
    return tuple(sorted(found, key=lambda fault: fault.at))


# --- the run of a schedule ---


class Schedule:
    """A world in which a plan comes true."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        (directory / "shared").mkdir(parents=True)
        self.plan = plan
        self.cluster = Cluster(plan.seed, directory, plan.configuration, plan.training)
        self.violations = list[str]()
        World.current = self.cluster
        self.cluster.has_internet = plan.nodes_have_internet
        self.run_dir = self.cluster.make_run(
            "run", plan.resources, plan.recovery, script=plan.is_script,
            notification=Notification(notify=("me",) if plan.notifies else ()),
        )  # fmt: skip
        self.next_dir: RunDir | None = None
        if plan.next_run:
            waits = {plan.next_run: (str(self.run_dir.path),)}
            self.next_dir = self.cluster.make_run(
                NEXT, replace(plan.resources, nodes=NodeRange(1)), recovery_of(hang_timeout="10s"), script=True, **waits
            )
        self._cancelled_at: float | None = None
        self._resumed_at = -1.0
        """When hpc resume was typed last."""
        self._seen = 0
        self._two_since: float | None = None
        self._next_has_begun = self._next_may_begin = False
        self._calm_since, self._has_supervisor = 0.0, False
        self._injected = list[tuple[float, Fault]]()

    def run(self) -> Outcome:
        """Let everything happen, then wait for the end of the run."""
        cluster, plan = self.cluster, self.plan
        cluster.start("login", "hpc submit", lambda: cluster.submit(self.run_dir))
        if (waiting := self.next_dir) is not None:
            cluster.start("login", "hpc submit --after", lambda: cluster.submit_next(waiting))
        if plan.has_supervisor:
            self._start_supervisor()
        for fault in plan.faults:
            self._wait_for(fault)
            self._check()
            cluster.tell(f"*** {fault}")
            self._injected.append((cluster.now, fault))
            self._inject(fault)
        end, self._calm_since = cluster.now + _CALM_SECONDS, cluster.now
        over_for = 0
        # A supervisor must leave a run alone that has ended.
        while cluster.now < end and over_for <= _AFTERWARDS_POLLS * self._has_supervisor:
            cluster.run(_POLL_SECONDS)
            self._check()
            over_for = over_for + 1 if self._is_over() else 0
            if over_for == 0 and plan.is_helped:
                self._help()
        self._check_end()
        return Outcome(
            plan=self.plan, violations=(*self.violations, *cluster.defects), timeline=tuple(cluster.timeline),
            state=str(self._history().outcome), seconds=cluster.now,
        )  # fmt: skip

    def _help(self) -> None:
        """Do what a person does, as the documentation says, for a run that nobody continues."""
        cluster = self.cluster
        several = len(self.plan.faults) > 1
        is_late = cluster.now - self._calm_since > _PATIENCE_SECONDS and (several or self._ended_too_early())
        if not self._has_supervisor and (is_late or self._needs_a_person()):
            cluster.tell("*** nobody continues the run: hpc supervise")
            self._start_supervisor()
        elif is_late and (stopped := self._stopped_run()):
            # The supervisor does not replace a job that ended before its agents had started.
            self._resume(stopped)
        elif is_late and self.next_dir and self._history().outcome == "completed":
            # Slurm has refused to release the job of the run that waits: hpc status says what to type.
            cluster.tell("*** scontrol release")
            for job in self._jobs(self.next_dir):
                job.held = False
        else:
            return
        self._calm_since = cluster.now

    def _stopped_run(self) -> RunDir | None:
        """Return a run that has not ended and has no job."""
        runs = [self.run_dir, *([self.next_dir] if self.next_dir else [])]
        stopped = (run for run in runs if not any(job.alive for job in self._jobs(run)))
        return next((run for run in stopped if History.load(run).outcome is None), None)

    def _wait_for(self, fault: Fault) -> None:
        cluster, deadline = self.cluster, self.cluster.now + _CALM_SECONDS
        while fault.after and cluster.now < deadline and not any(fault.after in line for line in cluster.timeline):
            cluster.run(_SHORT_SECONDS)
        cluster.run(fault.at - (0.0 if fault.after else cluster.now))

    def _start_supervisor(self) -> None:
        cluster, self._has_supervisor = self.cluster, True
        self._supervisor = cluster.start(
            "login", "hpc supervise", lambda: cluster.supervise(self.run_dir.path.parent, 10.0)
        )

    def _jobs(self, run: RunDir | None = None) -> list[Job]:
        script = str((run or self.run_dir).script)
        return [job for job in self.cluster.slurm.jobs.values() if job.script == script]

    def _history(self) -> History:
        return History.load(self.run_dir)

    def _needs_a_person(self) -> bool:
        """Return whether nothing will continue the run: it has no job, or one that is held or lost all its processes.

        One failure must not lead to that.
        """
        jobs = [job for job in self._jobs() if job.alive]
        stuck = all((job.held and job.waits) or self._is_empty(job) for job in jobs)
        busy = any(process.alive and process.name.startswith(_OF_RUN) for process in self.cluster.processes)
        return stuck and not busy and self._history().outcome is None and len(self.plan.faults) > 1

    def _ended_too_early(self) -> bool:
        """Return whether the batch script was killed before its agents started, or a job timed out in trouble."""
        timed_out = any(job.state is State.TIMEOUT for job in self.cluster.slurm.jobs.values())
        # The agents need some seconds to record the end.
        runs = [self.run_dir, *([self.next_dir] if self.next_dir else [])]
        is_unstarted = any(not History.load(run).attempts for run in runs)
        too_early = is_unstarted or self.plan.configuration.kill_wait < _RECORD_SECONDS
        in_trouble = self._had("kill-host", "isolate", "controller-away", "full", "storage-hangs", "storage-fails")
        return (timed_out and in_trouble) or (self._had("kill-script") and too_early)

    def _lacks_nodes(self) -> bool:
        """Return whether too few nodes are left for the run."""
        alive = set(self.plan.configuration.nodes) - set(self.cluster.slurm.dead) - self.cluster.broken
        return len(alive) < self.plan.resources.nodes.fewest + self.plan.recovery.spares

    def _is_over(self) -> bool:
        jobs = self._jobs()
        if any(process.alive for process in self.cluster.slurm.strays):
            return False
        if self._lacks_nodes() and all(job.waits for job in jobs if job.alive):
            return not self._lacks_message()
        without = not self.plan.has_supervisor and self._history().outcome == "completed"
        if any(job.alive and not (without and self._is_empty(job)) for job in jobs) or not jobs:
            return False
        typing = ("hpc cancel", "hpc resume", "hpc submit")
        busy = any(process.alive and process.name in typing for process in self.cluster.processes)
        return not busy and self._history().outcome is not None and self._next_is_over() and not self._lacks_message()

    def _lacks_message(self) -> bool:
        """Return whether the supervisor must still send the message about the end."""
        wanted = {"completed": "complete", "failed": "has failed"}.get(self._history().outcome or "")
        sends = self.plan.notifies and self._has_supervisor and wanted is not None
        return sends and not any(wanted in title for title in self.cluster.messages)

    def _next_is_over(self) -> bool:
        """Return whether the run that waits for this one has ended as well, or must not begin."""
        if self.next_dir is None:
            return True
        outcome, jobs = History.load(self.next_dir).outcome, self._jobs(self.next_dir)
        if self.plan.next_run == "after_ok" and self._history().outcome != "completed" and not self.cluster.next_steps:
            return all(job.waits and job.held for job in jobs if job.alive)
        return outcome is not None and not any(job.alive for job in jobs)

    def _is_empty(self, job: Job) -> bool:
        """Return whether a running job has lost its first node, and all its processes: only a supervisor ends it."""
        return job.state is State.RUNNING and all(not process.alive for process in job.processes)

    def _inject(self, fault: Fault) -> None:
        cluster, slurm = self.cluster, self.cluster.slurm
        until = cluster.now + fault.seconds
        running = [job for job in slurm.jobs.values() if job.state is State.RUNNING]
        agents = [each for each in cluster.processes_on(fault.host) if each.name.startswith("agent")]
        acts: dict[str, Callable[[], object]] = {
            **dict.fromkeys(KINDS, lambda: cluster.injected.append((fault.kind, fault.host))),
            "kill-host": lambda: fault.host in cluster.network.dead or cluster.kill_host(fault.host),
            "revive": lambda: fault.host in cluster.network.dead and cluster.revive_host(fault.host),
            "kill-agent": lambda: [each.end(137) for each in agents],
            "kill-script": lambda: [each.end(137) for each in cluster.processes if each.name.startswith("script")],
            "doom-agent": lambda: [setattr(each, "doomed_in", fault.number) for each in agents],
            "suspend": lambda: [setattr(each, "suspended_until", until) for each in cluster.processes_on(fault.host)],
            "cut": lambda: [self._cut(fault.host, host, until) for host in HOSTS],
            "isolate": lambda: [self._cut(fault.host, host, until) for host in (*HOSTS, LOGIN)],
            "cut-one-way": lambda: [cluster.network.cut(fault.host, host, until) for host in HOSTS],
            "clock": lambda: cluster.clock_offsets.update({fault.host: fault.seconds * (-1) ** fault.number}),
            "preempt": lambda: [slurm.preempt(job) for job in running],
            "requeue": lambda: [self._type("scontrol", "requeue", job.id) for job in running],
            "signal": lambda: slurm.signal(running, signal.SIGUSR2),
            "full": lambda: setattr(cluster.storage, "full_until", until),
            "storage-fails": lambda: cluster.storage.failing_until.update({fault.host: until}),
            "storage-hangs": lambda: cluster.storage.slow_until.update({fault.host: until}),
            "lost-link": lambda: setattr(cluster.storage, "lost_replies", 1),
            "controller-away": lambda: setattr(slurm, "away_until", until),
            "lost-reply": lambda: slurm.lose_replies_of.update(["sbatch", "scancel", "scontrol"]),
            "lost-submission": lambda: slurm.lose_replies_of.update(["sbatch"]),
            "refuse-requeue": lambda: slurm.refuse.update(["scontrol requeue"]),
            "refuse-sbatch": lambda: slurm.refuse.update(["sbatch"]),
            "refuse-update": lambda: slurm.refuse.update(["scontrol update"]),
            "kill-supervisor": self._restart_supervisor,
            "cancel": self._cancel,
            "resume": self._resume,
        }
        acts[fault.kind]()

    def _cut(self, one: str, other: str, until: float) -> None:
        self.cluster.network.cut(one, other, until)
        self.cluster.network.cut(other, one, until)

    def _type(self, *words: str) -> None:
        def run() -> int:
            try:
                self.cluster.slurm.run(*words)
            except TorchrelayError as error:
                self.cluster.tell(f"{' '.join(words)}: {error}")
            return 0

        self.cluster.start("login", " ".join(words), run)

    def _restart_supervisor(self) -> None:
        if self.plan.has_supervisor:
            self._supervisor.end(137)
            self._start_supervisor()

    def _cancel(self) -> None:
        cluster, typed_at = self.cluster, self.cluster.now

        def cancel() -> int:
            code = cluster.cancel(self.run_dir)
            if self._resumed_at < typed_at:
                self._cancelled_at = cluster.now
            return code

        cluster.start("login", "hpc cancel", cancel)

    def _resume(self, run: RunDir | None = None) -> None:
        cluster = self.cluster
        typed_at = self._resumed_at = cluster.now

        def resume() -> int:
            before, self._cancelled_at = self._cancelled_at, None
            code = cluster.resume(run or self.run_dir)
            was_last = self._resumed_at == typed_at
            if code and was_last and self._cancelled_at is None and before is not None:
                self._cancelled_at = cluster.now  # a job that it has queued nevertheless stops by itself
            return code

        cluster.start("login", "hpc resume", resume)

    # --- what must hold ---

    def _violate(self, text: str) -> None:
        if text not in self.violations:
            self.violations.append(text)
            self.cluster.tell(f"!!! {text}")

    def _check(self) -> None:
        self._check_jobs()
        self._check_next()
        for restored, newest in self.cluster.set_back:
            hurried = self._had("cancel") and self.plan.configuration.kill_wait < _RECORD_SECONDS
            # The first node waits for ranks that cannot save, and dies: Slurm ends the others before they notice it.
            hung = self._had("hang") and self._had("preempt") and self._had("kill-host")
            if not self._had(*_LOSE_STATES) and not hurried and not hung:
                self._violate(
                    f"the ranks begin after step {restored}, though a live node has the state of step {newest}"
                )
        for attempt, later in self.cluster.late_writes:
            self._violate(f"attempt {attempt} writes a checkpoint long after attempt {later} has begun")
        steps = self.cluster.steps[self._seen :]
        for at, attempt, _ in steps:
            self._check_step(at, attempt)
        self._seen = len(self.cluster.steps)

    def _check_next(self) -> None:
        """The run that waits for this one begins after its end."""
        if self.next_dir is None or self._next_has_begun:
            return
        if all(job.state is not State.RUNNING for job in self._jobs(self.next_dir)):
            self._next_may_begin = False
            return
        outcome = self._history().outcome
        wanted = {"completed"} if self.plan.next_run == "after_ok" else {"completed", "failed", "cancelled"}
        # A run that could not continue has failed, until hpc supervise submits its next job.
        has_job = outcome == "failed" and any(job.waits or job.state is State.RUNNING for job in self._jobs())
        self._next_may_begin |= outcome in wanted and not has_job
        if self.cluster.next_steps:
            self._next_has_begun = True
            if not self._next_may_begin and not self._had("resume") and not self._may_have_two_jobs():
                self._violate(f"the next run has begun, and this one is {outcome or 'not over'}")

    def _check_jobs(self) -> None:
        """One job of the run at a time, apart from jobs that wait; none after a cancellation."""
        cluster = self.cluster
        alive = [job for job in self._jobs() if job.waits or job.state is State.RUNNING]
        # Two jobs that both wait cost nothing: the old one may wait for a node after the death of its own.
        are_two = len(alive) > 1 and any(not job.waits for job in alive)
        self._two_since = (self._two_since or cluster.now) if are_two else None
        two_for = cluster.now - self._two_since if self._two_since and not self._may_have_two_jobs() else 0.0
        if two_for > _TWO_JOBS_SECONDS and not self._was_cut_off(cluster.now):
            self._violate(f"{len(alive)} jobs of the run are in the queue")
        since = self._cancelled_at
        if (
            since is not None
            and cluster.now - since > _CANCELLED_SECONDS
            and alive
            and not self._was_cut_off(cluster.now)
        ):
            self._violate(f"job {alive[0].id} is {alive[0].state} long after hpc cancel")

    def _may_have_two_jobs(self) -> bool:
        """Return whether the reply of sbatch was lost, and then Slurm requeued the old job, or its agents' node died.

        The job that starts last ends at once, or trains the last step again.
        """
        return self._had("preempt", "kill-host") and self._had("lost-reply", "lost-submission")

    def _had(self, *kinds: str) -> bool:
        return any(fault.kind in kinds for fault in self.plan.faults)

    def _check_step(self, at: float, attempt: int) -> None:
        overlap = _CUT_OFF_OVERLAP_SECONDS if self._was_cut_off(at) else _OVERLAP_SECONDS
        newer = [one for one, began in self.cluster.began.items() if one > attempt and began < at - overlap]
        if newer and not self._lacked_storage(at):
            self._violate(f"attempt {attempt} trains while attempt {newer[0]} does")
        if self._cancelled_at is not None and at > self._cancelled_at + 60.0 and not self._lacked_storage(at):
            self._violate("the run trains a minute after hpc cancel")

    def _was_cut_off(self, at: float) -> bool:
        """Return whether hosts could not hear of each other shortly before a time."""
        return self._lacked_storage(at) or self._were("cut", "cut-one-way", "isolate", "controller-away", at=at)

    def _lacked_storage(self, at: float) -> bool:
        """Return whether a process could not read the run's events shortly before a time."""
        return self._were("suspend", "storage-hangs", "storage-fails", "full", at=at)

    def _were(self, *kinds: str, at: float) -> bool:
        return any(
            began <= at <= began + fault.seconds + 60.0 for began, fault in self._injected if fault.kind in kinds
        )

    def _check_end(self) -> None:
        history = self._history()
        outcome = history.outcome
        if outcome is None and self._lacks_nodes():
            return
        alive = [job for job in self.cluster.slurm.jobs.values() if job.alive]
        if self._lacks_message():
            self._violate("no message tells of the end of the run")
        elif not self._is_over():
            states = ", ".join(f"job {job.id} {job.state} ({job.reason})" for job in alive) or "no job"
            self._violate(f"the run has not ended: {outcome}, {states}")
        elif outcome == "completed":
            final = max((step for _, _, step in self.cluster.steps), default=0)
            if final < self.plan.training.total_steps:
                self._violate(f"the run is complete after step {final} of {self.plan.training.total_steps}")
        elif outcome == "cancelled" and not self._had("cancel"):
            self._violate("the run counts as cancelled, and nobody has cancelled it")
        elif outcome == "failed" and not self._may_fail(history):
            self._violate(f"the run has failed: {self._why(history)}")
        self._check_budgets(history)
        self._check_expected(history)
        self._check_messages(history)

    def _check_messages(self, history: History) -> None:
        """What the messages say about the end is right; each is sent once, or again if its sender was killed."""
        says_failed = any("failed" in title for title in self.cluster.messages)
        if says_failed and history.outcome == "completed" and not self._had("resume"):
            self._violate("a message says that the run has failed, and it is complete")
        tries = Counter(event.notice for event in history.of(Notifying))
        if any(number > _MOST_TRIES for number in tries.values()):
            self._violate(f"a message was tried too often: {tries.most_common(1)}")
        # A sender may be killed, or lose its storage, between the message and its record.
        if len(self.cluster.messages) > len(tries) and not self._had(*_LOSE_STATES, "kill-host"):
            self._violate(f"{len(tries)} messages were sent {len(self.cluster.messages)} times")

    def _check_expected(self, history: History) -> None:
        plan, interruptions = self.plan, len(history.of(Interrupted))
        if plan.outcome not in {None, history.outcome}:
            self._violate(f"outcome: {history.outcome} instead of {plan.outcome}")
        if plan.attempts not in {None, len(history.attempts)}:
            self._violate(f"number of attempts: {len(history.attempts)} instead of {plan.attempts}")
        if plan.interruptions not in {None, interruptions}:
            self._violate(f"number of interruptions: {interruptions} instead of {plan.interruptions}")
        done = next((end.attempt for end in history.of(AttemptEnded) if end.cause == "completed"), None)
        later = next((one.attempt for one in history.attempts if done and one.attempt > done), None)
        if later and not self._had("resume"):
            self._violate(f"attempt {later} follows attempt {done}, which has completed the run")
        if any(end.cause == "cancelled" for end in history.of(AttemptEnded)) and not self._had("cancel"):
            self._violate("an attempt counts as cancelled, and nobody has cancelled it")

    @staticmethod
    def _why(history: History) -> str:
        last = history.last_attempt
        return f"{last.cause}: {last.detail}" if last else "no attempt"

    def _may_fail(self, history: History) -> bool:
        """Return whether a failed run is right: the same failure twice, too many failures, or no storage."""
        if history.not_continued is not None:
            no_requeue = self._had("refuse-requeue") or not self.plan.configuration.may_requeue
            return self._had("refuse-sbatch") and no_requeue
        # Nodes that lost each other may train no step within a time limit of a minute or two, twice in a row.
        cut_off = self._had("cut", "cut-one-way", "isolate") and self._why(history).startswith("time_limit")
        return len(self.plan.faults) > 1 or cut_off or self._had("full", "storage-fails")

    def _check_budgets(self, history: History) -> None:
        """Each failure of a rank is charged once; a dead GPU fails whenever ranks start there."""
        if self._had("device"):
            return
        injected = sum(fault.kind in KINDS for fault in self.plan.faults)
        charged = [
            event for event in history.events if isinstance(event, Interrupted | AttemptEnded)
            if event.cause in {"crashed", "out_of_memory", "hang", "bad_node"} and event.rank is not None
        ]  # fmt: skip
        if any(PEER_DIED in (event.detail or "") for event in charged) and not self._had(*_LOSE_STATES, "kill-host"):
            self._violate("a failure is charged to a rank that has only lost its peer")
        charged = list({event.failed_at: event for event in charged}.values())  # the last one may also end the attempt
        if len(charged) > injected and not self._had(*_LOSE_STATES, "kill-host"):
            causes = ", ".join(event.cause for event in charged)
            self._violate(f"{injected} failures of ranks were charged {len(charged)} times: {causes}")

    def close(self) -> None:
        """End the world."""
        self.cluster.close()
        World.current = None


def run(plan: Plan) -> Outcome:
    """Run a schedule, in a directory of its own in memory."""
    with tempfile.TemporaryDirectory(dir=DEV_SHM, prefix="simulation-") as directory:
        schedule = Schedule(plan, Path(directory))
        try:
            return schedule.run()
        finally:
            schedule.close()


def shrunk(outcome: Outcome) -> Outcome:
    """Return a schedule that violates something with as few faults as possible."""
    best, changed = outcome, True
    while changed:
        changed = False
        for number in range(len(best.plan.faults)):
            faults = (*best.plan.faults[:number], *best.plan.faults[number + 1 :])
            smaller = run(replace(best.plan, faults=faults))
            if smaller.violations:
                best, changed = smaller, True
                break
    return best
