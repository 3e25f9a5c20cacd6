"""The simulated cluster: its hosts, and the product's code in place of each process that it starts.

`install` puts stand-ins where the product's modules name the clock, threads, the network, files, Slurm and torchrun.
Outside of a simulation, each stand-in passes on to what it stands for.
"""

import contextlib
import importlib
import itertools
import os
import pkgutil
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import hpc
import hpc.base.files
import hpc.base.kernel
import jobs
from hpc.base.errors import TorchrelayError, UserError
from hpc.run.events.history import History
from hpc.run.events.kinds import Submitted
from hpc.run.events.ledger import EventWriter
from hpc.run.nodedir import NodeDir
from hpc.run.rundir import RunDir
from hpc.run.spec import Recovery, Resources, RunSpec
from hpc.run.spec_file import Program
from hpc.services.notification import delivery
from hpc.slurm import squeue, submission
from jobs import node_attempt
from jobs.control.messages import Directive
from jobs.node_attempt import NodeAllocation, NodeAttempt
from simulation.network import Network, SimulatedServer
from simulation.ranks import Group, LocalRanks, Torchrun, Training
from simulation.slurm import LOGIN, Configuration, Job, Slurm, State
from simulation.storage import SimulatedOs, SimulatedPath, Storage, storage
from simulation.world import EPOCH, Event, Process, StandIn, Thread, World

_AGENT_START_SECONDS = (0.1, 0.6)
_LOOK_SECONDS, _DELIVERY_SECONDS = 0.2, 25.0
_ABORTED_SHARE = 0.5
"""How often srun says that tasks were terminated, though they have ended by themselves while Slurm ended their job."""
NEXT = "next"
"""The name of the run that waits for the first one."""
_FENCED_SECONDS = 1.0
"""A save that begins this long after the first step of a later attempt must not be published."""
# Programs, not libraries.
_NOT_IMPORTED = ("__main__", "process_wrapper", "forked_script")


class Cluster(World):
    """A world with a cluster in it, and one user's runs."""

    def __init__(self, seed: int, root: Path, configuration: Configuration, training: Training) -> None:
        super().__init__(seed)
        self.root, self.training = root, training
        self.network = Network(self)
        self.storage = Storage(self, str(root / "shared"))
        self.slurm = Slurm(self, self.network, configuration, self._launch, self._shape)
        self.local = dict[int, Torchrun]()
        self.failed = dict[int, list[dict[str, Any]]]()
        """What the ranks of an agent's node have left of their failures, by the agent's process id."""
        self.groups = dict[tuple[str, int, int], Group]()
        self.allocations = dict[int, NodeAllocation]()
        self.injected = list[tuple[str, str]]()
        """The kinds and hosts of the failures that ranks must still have, at their next step."""
        self.broken = set[str]()
        """Hosts whose GPU is dead, until they are rebooted."""
        self.steps = list[tuple[float, int, int]]()
        """When an attempt did which step."""
        self.next_steps = list[float]()
        """When the run that waits for the first one did a step."""
        self.began = dict[int, float]()
        """When an attempt did its first step."""
        self.set_back = list[tuple[int, int]]()
        """From which step ranks have begun, and the newest step of which a live host had the state."""
        self.late_writes = list[tuple[int, int]]()
        """Attempts that have written a checkpoint, and the later attempt that had long begun."""
        self.has_internet = True
        """Whether messages can be sent from compute nodes; they always can from the login node."""
        self.messages = list[str]()
        """The titles of the messages about the first run that its user has received."""
        self.saved = dict[str, int]()
        """The newest step of which each live host has, or had, the state."""

    @classmethod
    def present(cls) -> "Cluster":
        """Return the cluster of the running process."""
        assert isinstance(World.current, cls)
        return World.current

    # --- runs ---

    def make_run(self, name: str, resources: Resources, recovery: Recovery, *, script: bool, **spec: Any) -> RunDir:
        """Make a run directory."""
        run = RunDir(SimulatedPath(self.root / "shared" / name))
        for directory in (run.events, run.logs, run.checkpoints, run.train_metrics.parent):
            directory.mkdir(parents=True, mode=0o700)
        run.path.chmod(0o700)
        program = Program(argv=("train.py",), reports_steps=not script, writes_result=not script)
        RunSpec(
            name=name, cluster="slurm", resources=resources, data=None, program=program, stage_dir="/tmp",
            python=sys.executable, recovery=recovery, id=name, **spec,
        ).save(run)  # fmt: skip
        run.script.write_text(f"srun {run.path}\n")
        run.environment.write_text("{}")
        return run

    def submit(self, run: RunDir) -> int:
        """Submit the first job of a run; if Slurm does not accept it, a person types `hpc submit` again."""
        from hpc.submissions.new_run import preemption_grace

        try:
            job_id = self.slurm.run("sbatch", *submission.requeue_options(), str(run.script)).strip()
        except TorchrelayError as error:
            self.tell(f"hpc submit: {error}")
            self.wait(5.0)
            queued = [job.id for job in self.slurm.jobs.values() if job.script == str(run.script)]
            if not queued:
                return self.submit(run)
            job_id = queued[-1]
        grace = preemption_grace(RunSpec.load(run))
        submitted = Submitted(job_id=job_id, cluster="slurm", stop_lead_seconds=30, grace_seconds=grace)
        try:
            EventWriter(run.events / "submit.jsonl").append(submitted)
        except OSError as error:
            self.tell(f"hpc submit: {error}")
        return 0

    def submit_next(self, run: RunDir) -> int:
        """Type `hpc submit --after`, until it succeeds."""
        from hpc.slurm.predecessors import dependency

        while not any(job.script == str(run.script) for job in self.slurm.jobs.values()):
            try:
                job_id = submission.submit(run.script, (), {}, dependency(run, RunSpec.load(run), squeue.jobs()))
                EventWriter(run.events / "submit.jsonl").append(Submitted(job_id=job_id, cluster="slurm"))
            except (TorchrelayError, OSError) as error:
                self.tell(f"hpc submit --after: {error}")
                self.wait(5.0)
        return 0

    def cancel(self, run: RunDir) -> int:
        """Type `hpc cancel`, until it succeeds."""
        from hpc.slurm.cancellation import cancel_run

        while True:
            try:
                cancel_run(run, History.load(run).outcome or "running")
            except (TorchrelayError, OSError) as error:
                self.tell(f"hpc cancel: {error}")
                self.wait(5.0)
            else:
                self.tell("hpc cancel has ended")
                return 0

    def resume(self, run: RunDir) -> int:
        """Type `hpc resume` once."""
        from hpc.submissions.resumed_run import options_of, resume_run

        try:
            resume_run(options_of({"run": str(run.path), "runs-dir": str(run.path.parent)}))
        except (UserError, TorchrelayError, OSError) as error:
            self.tell(f"hpc resume: {error}")
            return 1
        self.tell("hpc resume has ended")
        return 0

    def supervise(self, runs_dir: Path, interval: float) -> int:
        """Type `hpc supervise`."""
        from hpc.supervise.check import SuperviseOptions, check_runs

        options = SuperviseOptions(runs_dir=runs_dir)
        while True:
            try:
                for line in check_runs(options):
                    if line["action"] != "keep":
                        problem = f" ({line['problem']})" if line["problem"] else ""
                        self.tell(f"hpc supervise: {line['action']}: {line['reason']}{problem}")
            except (TorchrelayError, OSError) as error:
                self.tell(f"hpc supervise: {error}")
            self.wait(interval)

    # --- what Slurm starts ---

    def _shape(self, script: str) -> tuple[tuple[int, int], float, float]:
        spec = RunSpec.load(RunDir(SimulatedPath(script).parent))
        nodes = spec.job_nodes
        return (nodes.fewest, nodes.most), float(spec.resources.time_limit.seconds), float(spec.stop_lead_seconds)

    def _launch(self, job: Job) -> Process:
        return self.start(job.batch_host, f"script of job {job.id}", lambda: self._script(job))

    def _script(self, job: Job) -> int:
        """Run the batch script: the agents by srun, then the last resort."""
        from jobs import last_resort

        run, hosts, restart = str(SimulatedPath(job.script).parent), tuple(job.hosts), job.restarts
        agents = [self._start_agent(job, run, hosts, rank, restart) for rank in range(len(hosts))]
        while any(
            agent.alive or (agent.host in self.slurm.dead and agent.host not in self.slurm.down) for agent in agents
        ):
            self.wait(_LOOK_SECONDS)
        exit_code = max((agent.exit_code or 0 for agent in agents), default=0)
        if exit_code == 0 and job.state is State.COMPLETING and self.random.random() < _ABORTED_SHARE:
            exit_code = 128 + signal.SIGTERM
        if exit_code == 0:
            return 0
        self.allocations[self.process.pid] = self._allocation(job, hosts, 0, restart)
        self.tell(f"the last resort of job {job.id} begins: srun has ended with {exit_code}")
        return last_resort.main([run, str(exit_code)])

    def _allocation(self, job: Job, hosts: tuple[str, ...], rank: int, restart: int) -> NodeAllocation:
        return NodeAllocation(
            cluster="slurm", job_id=job.id, restart=restart, node_rank=rank, hostnames=hosts, cpus=None
        )

    def _start_agent(self, job: Job, run: str, hosts: tuple[str, ...], rank: int, restart: int) -> Process:
        from jobs import agent

        delay = self.random.uniform(*_AGENT_START_SECONDS)

        def begin() -> int:
            self.allocations[self.process.pid] = self._allocation(job, hosts, rank, restart)
            self.wait(delay)
            return agent.main([run])

        process = self.start(hosts[rank], f"agent {rank} of job {job.id}", begin)
        if hosts[rank] in self.network.dead:
            process.end(137)
        # A signal before Python handles it kills the agent.
        process.handle = lambda number: process.end(128 + number)
        job.processes.append(process)
        return process

    def memory(self, run: RunDir, host: str) -> NodeDir:
        """Return the run's files in a host's memory."""
        found = NodeDir(Path(self.root, "memory", host, run.name))
        for directory in found.directories:
            directory.mkdir(parents=True, exist_ok=True)
        return found

    def group_of(self, node: NodeAttempt, directive: Directive) -> Group:
        """Return the ranks of a round, which the first torchrun that joins makes."""
        key = (str(node.run.path), node.attempt.attempt, directive.round)
        if key not in self.groups:
            self.groups[key] = Group(self, node, directive)
        return self.groups[key]

    # --- what happens ---

    def take_injected(self, group: Group) -> tuple[str, str] | None:
        """Return the kind and the host of the failure that a rank of the group must have now."""
        if not self.injected:
            return None
        kind, host = self.injected.pop(0)
        hosts = {torchrun.host for torchrun in group.members.values()}
        return kind, host if host in hosts else min(hosts)

    def has_saved(self, group: Group, host: str, step: int) -> None:
        """Note a snapshot."""
        if group.run.name == NEXT:
            return
        self.saved[host] = step

    def has_stepped(self, group: Group, step: int) -> None:
        """Note a step."""
        if group.run.name == NEXT:
            self.next_steps.append(self.now)
            return
        self.steps.append((self.now, group.attempt, step))
        self.began.setdefault(group.attempt, self.now)

    def has_written(self, group: Group, since: float) -> None:
        """Note a checkpoint, which an attempt began to write at a time."""
        this, first = group.attempt, since - _FENCED_SECONDS
        if group.run.name != NEXT:
            self.late_writes += [(this, one) for one, began in self.began.items() if one > this and began < first]

    def has_restored(self, group: Group, step: int) -> None:
        """Note from which step the ranks begin."""
        if group.run.name == NEXT:
            self.tell(f"the ranks of the next run begin after step {step}")
            return
        newest = max(self.saved.values(), default=0)
        if newest > step:
            self.set_back.append((step, newest))
        self.saved = dict.fromkeys(self.saved, 0)
        self.tell(f"the ranks of attempt {group.attempt}, round {group.directive.round}, begin after step {step}")

    def kill_host(self, host: str) -> None:
        """Cut a host's power."""
        self.tell(f"{host} dies")
        self.network.dead.add(host)
        # Nobody misses an agent that had closed its connection, because it had lost contact with the first node.
        self.slurm.kill_host(host, has_agent=self.network.is_connected(host))
        for process in self.processes_on(host):
            process.end(137)
        shutil.rmtree(self.root / "memory" / host, ignore_errors=True)
        self.saved.pop(host, None)

    def revive_host(self, host: str) -> None:
        """Give it back."""
        self.tell(f"{host} is back")
        self.network.dead.discard(host)
        self.broken.discard(host)
        self.slurm.revive_host(host)

    def processes_on(self, host: str) -> list[Process]:
        """Return the processes that run on a host."""
        return [process for process in self.processes if process.alive and process.host == host]


# --- the stand-ins ---


class _Time(StandIn):
    """Stands for the module time."""

    def monotonic(self) -> float:
        world = World.current
        return time.monotonic() if world is None else world.now

    def time(self) -> float:
        world = World.current
        if world is None:
            return time.time()
        return EPOCH + world.now + (world.clock_offsets.get(world.process.host, 0.0) if world.task else 0.0)

    def sleep(self, seconds: float) -> None:
        world = World.current
        if world is None:
            time.sleep(seconds)
        else:
            world.wait(seconds)


class _Threading(StandIn):
    """Stands for the module threading."""

    Thread, Event = Thread, Event


class _Socket(StandIn):
    """Stands for the module socket where the product asks for the name of the host."""

    def gethostname(self) -> str:
        return World.current.process.host if World.current and World.current.task else "login"


class _Unique(StandIn):
    """Stands for the modules uuid and secrets where the product asks for what nobody else has."""

    _count = itertools.count(1)

    def uuid4(self) -> uuid.UUID:
        return uuid.UUID(int=next(self._count))

    def token_hex(self, _bytes: int) -> str:
        return f"{next(self._count):032x}"


class _Tempfile(StandIn):
    """Stands for the module tempfile where the product tries to write."""

    def TemporaryFile(self, **kwargs: Any) -> Any:  # noqa: N802 - as tempfile has it
        if here := storage():
            here.request(kwargs["dir"], writes=True)
        return tempfile.TemporaryFile(**kwargs)


class _HeldNodeDir:
    """Stands for hpc.run.nodedir.HeldNodeDir."""

    problem = ""

    def __init__(self, run: Path, _node_rank: int) -> None:
        cluster = Cluster.present()
        self.files = cluster.memory(RunDir(run), cluster.process.host)

    def restore(self) -> bool:
        return False

    def close(self, *, remove: bool) -> None:
        if remove:
            shutil.rmtree(self.files.path, ignore_errors=True)


class _NodeStaging:
    """Stands for jobs.staging.node_staging.NodeStaging: the run has no data."""

    def __init__(self, *_: object) -> None:
        pass

    def stage_data(self) -> None:
        world = Cluster.present()
        world.wait(world.random.uniform(0.1, 1.0))


class _Signal(StandIn):
    """Stands for the module signal where the product blocks signals: nothing sends any to the simulation."""

    def pthread_sigmask(self, *_: Any) -> None:
        return None


def _open(path: Any, mode: str = "r", **kwargs: Any) -> Any:
    here = storage()
    if here:
        here.request(path)
        if here.hides(path):
            raise FileNotFoundError(path)
    return open(path, mode, **kwargs)  # noqa: PTH123 - as the product does


def install() -> None:
    """Put the stand-ins into the product's modules, once."""
    for package in (hpc, jobs):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith(_NOT_IMPORTED) and "tracking" not in found.name:
                importlib.import_module(found.name)
    modules = (time, threading, socket, tempfile, uuid, secrets, os)
    kinds = (_Time, _Threading, _Socket, _Tempfile, _Unique, _Unique, SimulatedOs)
    stand_ins: dict[int, Any] = {id(module): kind(module) for module, kind in zip(modules, kinds, strict=True)}
    stand_ins |= {id(Path): SimulatedPath, id(node_attempt.log): _log}
    for name, module in list(sys.modules.items()):
        if not name.startswith(("hpc.", "jobs.", "torchrelay.", "training.checkpoint.snapshot")):
            continue
        for key, value in list(vars(module).items()):
            if id(value) in stand_ins and not key.startswith("__"):
                setattr(module, key, stand_ins[id(value)])
    for place, value in _REPLACED.items():
        owner, _, key = place.rpartition(".")
        setattr(sys.modules[owner], key, value)
    sys.modules["jobs.stop_request"].StopRequest.install = _install_signals
    shared = sys.modules["jobs.node_attempt"].SharedStorage
    shared.request, shared.finish = _request, lambda _self: None  # the storage fails, but never hangs


def _connect(address: tuple[str, int], _secret: str, _purpose: str, limits: Any) -> Any:
    return Cluster.present().network.connect(address, limits)


def _serve(_secret: str, _purpose: str, serve: Callable[[Any], None], limits: Any, ports: Sequence[int] = ()) -> Any:
    return SimulatedServer(Cluster.present().network, serve, limits, ports)


def _request(_storage: Any, act: Callable[[], Any]) -> Future[Any]:
    answer = Future[Any]()
    try:
        answer.set_result(act())
    except Exception as error:  # noqa: BLE001 - raised where the answer is awaited
        answer.set_exception(error)
    return answer


def _install_signals(stop: Any) -> None:
    cluster = Cluster.present()
    cluster.process.handle = lambda number: stop.handle(signal.Signals(number), None)


def _is_alive(pid: Any, _started: Any) -> bool:
    return any(process.pid == int(pid) and process.alive for process in Cluster.present().processes)


def _log(text: str) -> None:
    cluster = Cluster.present()
    if cluster.task:
        cluster.tell(f"    {cluster.process.host}: {text}")


def _node_dirs(run: Path) -> list[NodeDir]:
    cluster = Cluster.present()
    return [cluster.memory(RunDir(run), cluster.process.host)]


def _deliver(run: RunDir, *, retry: bool = False, failure: str | None = None) -> None:
    """Stand for run_delivery."""
    cluster = Cluster.present()
    words = [str(run.path), *(["--retry"] if retry else []), *([] if failure is None else [f"--failure={failure}"])]
    process = cluster.start(cluster.process.host, "delivery", lambda: delivery.main(words))
    deadline = cluster.now + _DELIVERY_SECONDS
    while process.alive and cluster.now < deadline:
        cluster.wait(_LOOK_SECONDS)
    if process.exit_code != 0:
        process.end(137)
        raise subprocess.CalledProcessError(process.exit_code or 1, "delivery")


def _try_to_send(_recipient: str, title: str, _body: str, _seconds: float) -> str | None:
    cluster = Cluster.present()
    cluster.wait(cluster.random.uniform(0.1, 2.0))
    if cluster.process.host != LOGIN and not cluster.has_internet:
        return "no route to host"
    cluster.tell(f"message: {title}")
    cluster.messages.append(title)
    return None


def _allocation(_environment: Any) -> NodeAllocation:
    cluster = Cluster.present()
    return cluster.allocations[cluster.process.pid]


_REPLACED: dict[str, Any] = {
    "hpc.base.files.open": _open,
    "hpc.base.kernel._CLOCK_OFFSET": EPOCH,
    "hpc.slurm.alive.print": lambda text, **_: Cluster.present().tell(text),
    "hpc.slurm.client.complete": lambda *command, **_: Cluster.present().slurm.complete(*command),
    "hpc.slurm.client.makes_job_directories": lambda: False,
    "hpc.slurm.handover.is_alive": _is_alive,
    "hpc.slurm.handover.start_time": lambda _pid: 1,
    "hpc.services.notification.delivery.print": lambda *_args, **_kwargs: None,
    "hpc.services.notification.delivery.try_to_send": _try_to_send,
    "hpc.supervise.check.run_delivery": _deliver,
    "jobs.control.channel.Server": _serve,
    "jobs.control.channel.connect": _connect,
    "jobs.control.channel._TICK_SECONDS": 1.0,
    "jobs.agent.HeldNodeDir": _HeldNodeDir,
    "jobs.agent.NodeStaging": _NodeStaging,
    "jobs.agent.sending": lambda _node: contextlib.nullcontext(),  # metrics have no effect on the recovery
    "jobs.agent.find_allocation": _allocation,
    "jobs.agent.first_node_hosts": lambda head, _addresses, _interface: [head],
    "jobs.agent.own_addresses": lambda _interface: [Cluster.present().process.host],
    "jobs.agent.pick_port": lambda _ports: Cluster.present().network.free_port(),
    "jobs.agent.prepare_round": lambda *_args, **_: None,
    "jobs.agent.raise_open_files_limit": lambda: None,
    "jobs.ending.node_dirs": _node_dirs,
    "jobs.last_resort.find_allocation": _allocation,
    "jobs.senders.run_delivery": _deliver,
    "jobs.senders.signal": _Signal(signal),
    "jobs.ranks.monitor.LocalRanks": LocalRanks,
    "jobs.ranks.round._start": lambda node, _channel, _monitor, directive, _setup: Torchrun(
        Cluster.present(), node, directive
    ),
    "jobs.agent._POLL_SECONDS": 0.5,
    "jobs.ranks.round._POLL_SECONDS": 0.5,
    "jobs.ranks.monitor._INTERVAL_SECONDS": 0.5,
}
