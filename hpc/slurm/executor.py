"""Submits a run's sbatch script, or starts the same agents on this machine, through submitit. Runs on the login node.

submitit pickles a function, and finds the pickle by the job's id. But a script that is submitted again by hand gets a
new id, so our command names the run directory instead, and nothing is pickled.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from hpc.base.compat import SubmititLocal, SubmititSlurm
from hpc.base.environment import PYTHONPATH
from hpc.base.errors import NotNowError, TorchrelayError
from hpc.base.files import write_atomic
from hpc.base.kernel import ENDING_SIGNALS, start_time
from hpc.run.events.kinds import Submitted
from hpc.run.events.ledger import EventWriter
from hpc.run.own_packages import own_pythonpath
from hpc.run.rundir import RunDir
from hpc.run.spec import Resources, RunSpec
from hpc.slurm import bad_nodes, handover, sinfo, squeue, submission
from hpc.slurm.predecessors import dependency
from hpc.slurm.submission import StartEstimate, lacks_nodes, parse_estimate

# The script's srun inherits these variables from the shell in which sbatch was typed. In another job's shell, they pin
# every rank to the wrong cores, give the only task of a node one of its GPUs, or make srun refuse. If --sbatch has the
# option of the same name, Slurm itself sets the variable in the job, so it stays.
_BINDING = (
    "CPU_BIND", "CPU_BIND_LIST", "CPU_BIND_TYPE", "CPU_BIND_VERBOSE", "MEM_BIND", "GPU_BIND", "TRES_BIND", "GPUS",
    "GPUS_PER_TASK", "GPUS_PER_SOCKET", "TRES_PER_TASK", "NTASKS_PER_GPU", "NTASKS_PER_TRES", "CPUS_PER_GPU",
    "MEM_PER_GPU",
)  # fmt: skip
# Signals may also reach the script, but the script must outlive the agents. What it ignores, jobs.last_resort ignores:
# a SIGINT would end it during its imports.
_SIGNALS = " ".join(number.name.removeprefix("SIG") for number in ENDING_SIGNALS)
_OUTLIVE, _IGNORE = f"trap : {_SIGNALS}", f"trap '' {_SIGNALS}"
# In the shell of a job array or heterogeneous job, sbatch passes that job's variables on, and srun would obey them.
_REFUSED = (
    "torchrelay: this job is a part of a job array or a heterogeneous job, or was submitted in one, but a run is one "
    "job. Nothing was started: type sbatch {}, without --array and outside of such a job"
)


def agent_command(run: RunDir, module: str = "jobs.agent") -> str:
    """Return the shell command that runs a module of the run's copy of our packages, by default the node agent.

    PYTHONPATH names the copy. Without -P, python -m would first import from the current directory, whose code may have
    changed.
    """
    return shlex.join(
        ["env", f"PYTHONPATH={own_pythonpath(run.packages)}", sys.executable, "-u", "-P", "-m", module, str(run.path)]
    )


def _one_job(run: RunDir) -> str:
    """Return the line that refuses an array or heterogeneous job: Slurm would start the run once for each part."""
    text = shlex.quote(_REFUSED.format(run.script))
    return f'[ -z "${{SLURM_ARRAY_JOB_ID-}}${{SLURM_HET_SIZE-}}" ] || {{ echo {text}; exit 1; }}'


def _whole_packages(run: RunDir) -> list[str]:
    """Return script lines that end the job if our packages in the run directory are damaged, and record why.

    With an empty jobs/agent.py, as storage that failed may leave it, the job would end with exit code 0.
    """
    told = f"{run.packages} is damaged: type hpc resume {shlex.quote(str(run.path))} --new-code"
    checksums = run.package_checksums
    check = f"cd {shlex.quote(str(checksums.parent))} && sha256sum --check {checksums.name}"
    file = f'{shlex.quote(str(run.events))}/job-"$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}".jsonl'
    event = """'{"event":"refused","time":%s,"job_id":"%s","restart":%s,"detail":%s}\\n'"""
    values = f'"$(date +%s)" "$SLURM_JOB_ID" "${{SLURM_RESTART_COUNT:-0}}" {shlex.quote(json.dumps(told))}'
    return [
        f"({check}) >/dev/null 2>&1 || {{ echo {shlex.quote(f'torchrelay: {told}')}",
        f"printf {event} {values} >>{file}",
        "exit 1; }",
    ]


def _unset(resources: Resources) -> str:
    typed = {option.partition("=")[0].replace("-", "_").upper() for option in resources.sbatch}
    names = [*_BINDING, *([] if resources.gpus_per_node.count else ["GPUS_PER_NODE"])]
    return shlex.join(["unset", *(f"SLURM_{name}" for name in names if name not in typed)])


def setup(run: RunDir, resources: Resources) -> list[str]:
    """Return the script's lines before srun. Each of the user's lines (--setup) must succeed, or no agent starts. Pure.

    eval keeps a user's line from continuing in ours. The trap reports the line if it fails, or if an `exit` or `set -e`
    in it ends the script.
    """
    first = [_OUTLIVE, _one_job(run), _unset(resources)]
    if not resources.setup:
        return first
    failed = f'exit_code=$?; {_IGNORE}; exec {agent_command(run, "jobs.last_resort")} $exit_code "$torchrelay_setup"'
    return [
        *first, "export SUBMITIT_EXECUTOR=slurm", f"trap {shlex.quote(failed)} EXIT",
        *(f'torchrelay_setup={shlex.quote(line)}\neval "$torchrelay_setup" || exit' for line in resources.setup),
        "trap - EXIT", "set +eu",
        # The user's script needs this PYTHONPATH. The agents do not use it: its packages could break them.
        f'export {PYTHONPATH}="${{PYTHONPATH-}}"',
    ]  # fmt: skip


def last_resort(run: RunDir) -> list[str]:
    """Return the script's lines after srun. If srun fails, jobs.last_resort does what the agents left undone."""
    return ["exit_code=$?", "[ $exit_code = 0 ] && exit", _IGNORE,
            f"exec {agent_command(run, 'jobs.last_resort')} $exit_code", ""]  # fmt: skip


class SlurmExecutor(SubmititSlurm):
    """Writes and submits `submit.sbatch` of a run directory."""

    def __init__(self, run: RunDir, spec: RunSpec) -> None:
        super().__init__(run.logs, agent_command(run))
        self.run, self.spec, self.waits_for = run, spec, ""
        before = [handover.start_line(), *_whole_packages(run), *setup(run, spec.resources)]
        after = last_resort(run)
        self.update_parameters(**sbatch_parameters(spec), setup=before, teardown=after)

    @cached_property
    def excluded(self) -> list[str]:
        """The nodes that this job excludes: the user's --exclude, and nodes that have failed the user's other runs."""
        try:
            return bad_nodes.nodes_to_exclude(self.run, self.spec)
        except TorchrelayError:
            return bad_nodes.typed_exclude(self.spec)  # sbatch will say what is wrong

    @property
    def notes(self) -> list[str]:
        """What differs from the user's flags, for the user."""
        more = set(self.excluded) - set(bad_nodes.typed_exclude(self.spec))
        # Usually there are none, and then the runs directory need not be searched again.
        avoided = [str(bad) for bad in bad_nodes.known(self.run.path.parent) if bad.node in more] if more else []
        remove = f"to use a node again, remove .bad-node.*.NODE.* in {self.run.path.parent}"
        return [f"the job avoids {', '.join(avoided)}; {remove}"] if avoided else []

    def prepare(self, directory: RunDir) -> None:
        """Find the jobs to wait for, and write the job's files into `directory`, which still has a temporary name.

        Raises:
            TorchrelayError: Slurm does not answer; or a run of --after-ok did not complete, or a run to wait for has
                no job.
        """
        if self.spec.after or self.spec.after_ok:
            # The script does not name the dependency, because the run's later jobs use it with other dependencies.
            self.waits_for = dependency(self.run, self.spec, squeue.jobs())
        write_atomic(directory.environment, json.dumps(dict(os.environ)), mode=0o600)
        write_atomic(directory.script, self.script())

    def start(self) -> str:
        """Submit the script that `prepare` wrote, and return the job's id.

        Raises:
            NotNowError: sbatch refused the script.
            TorchrelayError: sbatch failed, and it is unknown whether the job is queued.
        """
        options = [f"--dependency={self.waits_for}"] if self.waits_for else []
        options += [] if self.spec.recovery.start_once else submission.requeue_options()
        try:
            return self._excluding(lambda exclude: submission.queue(self.run.script, [*options, *exclude]))
        except submission.NotQueuedError as error:
            raise NotNowError(f"sbatch refused the job: {error}") from error

    def estimate_start(self) -> StartEstimate | None:
        """Return when Slurm would start the job; None if too few nodes are in service now.

        Raises:
            NotNowError: sbatch would refuse the job.
        """
        # The nodes are counted before sbatch is asked: if nodes return to service in between, sbatch's refusal must not
        # be taken for the user's mistake.
        in_service = len(sinfo.responding_nodes(self.spec.resources.partition))
        try:
            return parse_estimate(self._excluding(lambda exclude: submission.test(self.script(), exclude)))
        except submission.NotQueuedError as error:
            # With --test-only, sbatch refuses a job that it would otherwise queue until enough nodes are back.
            if (
                "Requested node configuration is not available" in str(error)
                and in_service < self.spec.job_nodes.fewest
            ):
                return None
            raise NotNowError(f"sbatch refused the job: {error}") from error

    def _excluding(self, ask: Callable[[list[str]], str]) -> str:
        """Call sbatch with the option that excludes `excluded`; if it refuses that, only the user's --exclude."""
        try:
            return ask(submission.exclude_option(self.excluded))
        except submission.NotQueuedError as error:
            typed = bad_nodes.typed_exclude(self.spec)
            if self.excluded == typed or not lacks_nodes(str(error)):
                raise
            self.excluded = typed
            return ask(submission.exclude_option(typed))


def sbatch_parameters(spec: RunSpec) -> dict[str, Any]:
    """Return submitit's parameters for the job of a run. Pure."""
    resources = spec.resources
    options = (option.partition("=") for option in resources.sbatch)
    extra: dict[str, Any] = {key: value if separator else True for key, separator, value in options}
    # With --requeue, Slurm requeues a job whose node died even if JobRequeue=0. A job that waits for other runs needs
    # it with --start-once, too: if it starts too early, it is requeued (jobs.claim).
    starts_once = spec.recovery.start_once and not (spec.after or spec.after_ok)
    extra["no-requeue" if starts_once else "requeue"] = True
    if spec.shortest_minutes is not None:
        extra["time-min"] = spec.shortest_minutes
    fewest, most = spec.job_nodes.fewest, spec.job_nodes.most
    if most != fewest:
        extra["nodes"] = f"{fewest}-{most}"
    if most > 1:
        # With --no-kill, a job survives the death of a node. For one node, Slurm shall requeue the job instead.
        extra["no-kill"] = True
    # sbatch's --no-kill keeps the allocation, but not the step: when a node dies, srun without these options would end
    # the agents on the other nodes.
    survive = ["--no-kill", "--kill-on-bad-exit=0"] if most > 1 else ["--kill-on-bad-exit=1"]
    optional = {key: getattr(resources, key) for key in ("mem", "partition", "account", "qos", "constraint", "exclude")}
    return {
        **{key: str(value) for key, value in optional.items() if value is not None},
        "job_name": spec.name,
        "time": resources.time_limit.minutes,
        "nodes": fewest,
        # A cluster without GPUs refuses --gpus-per-node, even with 0.
        "gpus_per_node": str(resources.gpus_per_node) if resources.gpus_per_node.count else None,
        "cpus_per_task": resources.cpus_per_node,
        "signal_delay_s": spec.stop_lead_seconds,
        "stderr_to_stdout": True,
        "wckey": None,  # clusters with a list of keys refuse submitit's default
        "srun_args": [
            # As an option of sbatch, --ntasks-per-node would limit the job's tasks to the fewest nodes of a range, and
            # Slurm would give the job no more nodes.
            "--ntasks-per-node=1",
            # Since 22.05, srun does not inherit this option from sbatch. Without it, all ranks would use the same core.
            f"--cpus-per-task={resources.cpus_per_node}",
            *survive,
            # An agent takes the number of its task for the number of its node in the job. Since 26.05, these numbers
            # may differ on a cluster with a topology.
            "--distribution=block",
            # Without --wait=0, Slurm would end the step WaitTime seconds after the first task, perhaps on a lost node.
            "--wait=0",
            "--mpi=none",
        ],
        "additional_parameters": extra,
    }


def start_local(run: RunDir) -> str:
    """Start a local run in a session of its own and return the job's id. Raises NotNowError if it does not start.

    submitit's controller inherits the standard streams and the session of the process that starts it: started here, it
    would keep the user's pipe open and end at Ctrl-C. So a separate process starts it.
    """
    command = [sys.executable, "-P", "-m", "hpc.slurm.executor", str(run.path)]
    with (run.logs / "controller.log").open("ab") as log:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, check=False
        )
    pid_file = run.logs / "controller.pid"
    if done.returncode != 0 or not pid_file.exists():
        # The error quotes the log, because the directory of a run that has never started is removed.
        why = (run.logs / "controller.log").read_text(errors="replace").strip().splitlines()[-1:]
        raise NotNowError(f"the local run did not start: {' '.join(why) or f'exit code {done.returncode}'}")
    return pid_file.read_text().strip()


def main(argv: list[str]) -> None:
    """Start the agents, one task per simulated node, under submitit's controller, and record its id.

    A separate process does this, because the user may kill `hpc`.
    """
    run = RunDir(Path(argv[0]))
    spec = RunSpec.load(run)
    nodes = spec.resources.nodes.most
    executor = SubmititLocal(run.logs, agent_command(run))
    executor.update_parameters(
        tasks_per_node=nodes,
        gpus_per_node=nodes * spec.resources.gpus_per_node.count,
        timeout_min=spec.resources.time_limit.minutes,
        signal_delay_s=spec.stop_lead_seconds,
        stderr_to_stdout=True,
    )
    job_id = executor.start()
    submitted = Submitted(
        job_id=job_id,
        cluster=spec.cluster,
        started=start_time(job_id),
        stop_lead_seconds=spec.stop_lead_seconds,
    )
    EventWriter(run.events / "controller.jsonl").append(submitted)
    (run.logs / "controller.pid").write_text(job_id + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
