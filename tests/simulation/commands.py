"""Commands of Slurm, and the states that follow: the same on the real Slurm and on the simulated one.

`python -m tests.simulation --commands` prints those of the simulated one as JSON.
"""

from collections.abc import Callable
from pathlib import Path

from hpc.base.errors import TorchrelayError
from hpc.slurm import client as slurm
from hpc.slurm import squeue, submission

_PATIENCE_SECONDS, _POLL_SECONDS = 90.0, 0.5
Observation = tuple[str, str, int]
"""What was done, the state that followed, and the number of restarts."""


def observe(script: Path, sleep: Callable[[float], None], now: Callable[[], float]) -> list[Observation]:
    """Do the same with jobs of a script that sleeps, whatever the Slurm."""
    found = list[Observation]()

    def note(what: str, job_id: str, *wanted: str) -> None:
        """Wait until the job is in one of some states."""
        deadline = now() + _PATIENCE_SECONDS
        while (job := squeue.jobs()[job_id]).state.value not in wanted and now() < deadline:
            sleep(_POLL_SECONDS)
        held = ", held" if "held" in job.reason else ""
        found.append((what, f"{job.state.value}{held}", job.restarts))

    def refused(what: str, act: Callable[[], object]) -> None:
        answer = "accepted"
        try:
            act()
        except TorchrelayError:
            answer = "refused"
        found.append((what, answer, 0))

    one = submission.submit(script, [])
    note("submit", one, "RUNNING")
    refused("start time of a running job", lambda: slurm.update(one, StartTime="now+2"))
    slurm.requeue(one)
    note("requeue a running job", one, "PENDING")
    refused("requeue a pending job", lambda: slurm.requeue(one))
    slurm.update(one, StartTime="now+1")
    note("end its delay", one, "RUNNING")
    slurm.requeue_held(one)
    note("requeue it held", one, "PENDING")
    slurm.release(one)
    slurm.update(one, StartTime="now+1")
    note("release it", one, "RUNNING")
    two = submission.submit(script, [], dependency=f"afterany:{one}")
    note("submit a job that waits", two, "PENDING")
    refused("excluded nodes of a pending job", lambda: slurm.update(two, ExcNodeList="gpu01"))
    slurm.cancel(one)
    note("cancel", one, "CANCELLED")
    note("the one that waited", two, "RUNNING")
    slurm.requeue(one)
    note("requeue a cancelled job", one, "PENDING")
    slurm.cancel(one)
    note("cancel a pending job", one, "CANCELLED")
    refused("cancel a cancelled job", lambda: slurm.cancel(one))
    slurm.cancel(two)
    note("cancel the other", two, "CANCELLED")
    refused("unknown job", lambda: slurm.requeue("99999"))
    return found


def simulated() -> list[Observation]:
    """Return the observations of the simulated Slurm."""
    from simulation.cluster import install
    from simulation.network import Network
    from simulation.slurm import Configuration, Job, Slurm
    from simulation.world import Process, World

    install()
    world = World(1)
    World.current = world

    def launch(job: Job) -> Process:
        def sleep_for_long() -> int:
            world.wait(3600.0)
            return 0

        process = world.start(job.batch_host, "script", sleep_for_long)
        process.handle = lambda number: process.end(128 + number)
        return process

    cluster = Slurm(
        world, Network(world), Configuration(nodes=("gpu01", "gpu02")), launch, lambda _: ((1, 1), 3600.0, 30.0)
    )
    slurm.complete = lambda *words, **_: cluster.complete(*words)
    found = list[Observation]()

    def login() -> int:
        found.extend(observe(Path("/job/submit.sbatch"), world.wait, lambda: world.now))
        return 0

    process = world.start("login", "login", login)
    world.run(2000.0, until=lambda: not process.alive)
    world.close()
    assert not world.defects, world.defects
    return found
