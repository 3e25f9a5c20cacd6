"""What a command costs who types it: time, CPU, memory, imports. For cost.py; runs on the login node of a testbed."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks import views

# Python imports a module of this name when it starts. Read at the process's end, because the kernel's own record of a
# child's peak begins with what its parent had.
_PROBE = """
import os
if os.environ.get("PROBE_PARENT") == str(os.getppid()):
    import atexit
    @atexit.register
    def _report():
        import json, sys
        status = dict(line.split(":", 1) for line in open("/proc/self/status"))
        names = "torch", "torchvision", "pandas", "numpy", "rich", "submitit"
        heavy = [name for name in names if name in sys.modules]
        with open(os.environ["PROBE_OUTPUT"], "w") as file:
            json.dump({"modules": len(sys.modules), "megabytes": int(status["VmHWM"].split()[0]) / 1024,
                       "heavy": heavy}, file)
"""
SUBMITIT = """
import submitit
executor = submitit.AutoExecutor(folder="logs", cluster="slurm")
executor.update_parameters(nodes=2, tasks_per_node=1, cpus_per_task=1, timeout_min=60, slurm_gpus_per_node=1)
print(executor._executor._make_submission_file_text("torchrun train.py", "id"))
"""
SCRIPT = "import torch\nprint(torch.__version__)\n"


@dataclass(frozen=True, kw_only=True)
class Command:
    """What somebody types."""

    name: str
    argv: Sequence[str]
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)


def commands(root: Path, rivals: Path | None) -> list[Command]:
    """Those that are compared; `root` is an empty directory."""
    hpc = [str(Path(sys.executable).with_name("hpc"))]
    project = root / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    for command in (("git", "init", "-q"), ("git", "add", "train.py")):
        subprocess.run(command, cwd=project, check=True)
    submit = [*hpc, "submit", "--dry-run", "--nodes=2", "--gpus-per-node=1", "--cpus-per-gpu=1", "--time=1h"]
    found = [
        Command(name="python -c pass", argv=[sys.executable, "-c", "pass"], directory=project),
        Command(name="squeue", argv=["squeue"], directory=project),
        Command(name="hpc submit --dry-run -- train.py", argv=[*submit, "--", "train.py"], directory=project),
        Command(
            name="the same with --cluster local, which asks no Slurm",
            argv=[*submit, "--cluster=local", "--", "train.py"],
            directory=project,
        ),
        Command(
            name="hpc submit --dry-run --data fashion-mnist",
            argv=[*submit, "--data=fashion-mnist"],
            directory=project,
        ),
    ]
    if rivals:
        path = {"PATH": f"{rivals.parent}:{os.environ['PATH']}"}
        torchx = [str(rivals.with_name("torchx")), "run", "--dryrun", "-s", "slurm", "dist.ddp", "-j", "2x1"]
        found += [
            Command(name="submitit: the text of its script", argv=[str(rivals), "-c", SUBMITIT], directory=project),
            Command(
                name="torchx run --dryrun -s slurm",
                argv=[*torchx, "--script", "train.py"],
                directory=project,
                environment=path,
            ),
        ]
    return [*found, *status_commands(root, hpc)]


def status_commands(root: Path, hpc: Sequence[str]) -> list[Command]:
    """`hpc status` of some numbers of runs, as views.py makes them, with a full queue."""
    found = []
    for number in (1, 20, 200):
        made = root / f"{number}-runs"
        made.mkdir()
        views.make(made, views.Options(runs=number, jobs=max(10, number)))
        environment = {"PATH": f"{made}/bin:{os.environ['PATH']}", "SLURM_CONF": f"{made}/slurm.conf"}
        argv = [*hpc, "status", f"--runs-dir={made / 'runs'}"]
        name = f"hpc status, {number} run{'s' * (number > 1)}"
        found.append(Command(name=name, argv=argv, directory=made, environment=environment))
        if number == 20:
            named = Command(
                name="hpc status NAME", argv=[*argv, "resnet50-0006"], directory=made, environment=environment
            )
            found.append(named)
    return found


def timed(command: Command) -> tuple[float, float]:
    """Seconds, and seconds of CPU of a command and its children."""
    began = time.perf_counter()
    child = subprocess.Popen(
        command.argv, cwd=command.directory, env=os.environ | dict(command.environment), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert child.stdout is not None  # noqa: S101  # it is a pipe
    printed = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{shlex.join(command.argv)} failed:\n{printed}")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime


def probed(command: Command) -> dict[str, object]:
    """The peak of memory and the modules that a command's Python imports; nothing of other programs."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        (directory / "sitecustomize.py").write_text(_PROBE)
        output = directory / "output.json"
        environment = os.environ | dict(command.environment) | {
            "PYTHONPATH": made, "PROBE_PARENT": str(os.getpid()), "PROBE_OUTPUT": str(output)
        }  # fmt: skip
        subprocess.run(
            command.argv, cwd=command.directory, env=environment, check=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        if not output.exists():
            return {}
        found = json.loads(output.read_text())
    return {
        "peak memory, MB": round(found["megabytes"]),
        "modules": found["modules"],
        "among them": ", ".join(found["heavy"]) or "none of the heavy",
    }


def measure(rivals: Path | None, repeats: int) -> list[dict[str, object]]:
    """The rows of the table: the commands take turns."""
    # Not below /tmp, which each node has for itself: no place for a run.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        all_of_them = commands(Path(made), rivals)
        timings: dict[str, list[tuple[float, float]]] = {command.name: [] for command in all_of_them}
        for turn in range(repeats + 1):
            for command in all_of_them:
                result = timed(command)
                if turn:  # the first one reads the files from the disk
                    timings[command.name].append(result)
            print(f"commands: {turn} of {repeats}", file=sys.stderr, flush=True)
        return [row(command, timings[command.name]) for command in all_of_them]


def row(command: Command, found: list[tuple[float, float]]) -> dict[str, object]:
    """Medians and spread of a command."""
    seconds, cpu = zip(*found, strict=True)
    return {
        "command": command.name,
        "seconds": round(median(seconds), 3),
        "least": round(min(seconds), 3),
        "most": round(max(seconds), 3),
        "CPU, s": round(median(cpu), 3),
        **probed(command),
    }
