"""Reads the command that starts a training in a batch script: python, torchrun or accelerate, perhaps with srun.

Pure; runs on the login node. The messages of its errors do not name the line.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from hpc.base.errors import UserError
from hpc.submissions.sbatch.batch_options import Option, read_options

_PYTHON = re.compile(r"python[\d.]*")
# What may follow the options of srun: a program that starts a training, what stands before it, or one that only prints.
_PROGRAM = re.compile(
    r"(.*/)?(python[\d.]*|torchrun|accelerate|bash|sh|env|time|apptainer|singularity|hostname|nvidia-smi|date|echo)|.*\.(sh|py)"
)
_SRUN_REFUSED = re.compile(
    r"array|het-group|multi-prog|nodelist|exclude|-r|relative|container.*|environment|(task-)?prolog|export"
)
_ACCELERATE_EXPORTS = {
    "mixed-precision": "ACCELERATE_MIXED_PRECISION", "num-cpu-threads-per-process": "OMP_NUM_THREADS",
    "gradient-accumulation-steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
}  # fmt: skip
# The options of Accelerate's launcher that only place the ranks.
_ACCELERATE_PLACEMENT = {
    "debug", "gpu-ids", "log-dir", "machine-rank", "main-process-ip", "main-process-port", "max-restarts",
    "monitor-interval", "multi-gpu", "num-machines", "num-processes", "quiet", "rdzv-backend",
    "rdzv-conf", "role", "same-network", "tee",
}  # fmt: skip


_LAUNCHERS: dict[tuple[str, ...], str] = {
    ("-m", "torch.distributed.run"): "torchrun", ("-m", "torch.distributed.launch"): "torchrun",
    ("-m", "accelerate.commands.launch"): "accelerate",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The command that starts a training."""

    words: tuple[str, ...]
    """The program and its arguments, without srun and what else stands before it."""
    step: tuple[Option, ...] | None = None
    """The options of srun; None without srun."""
    exports: tuple[tuple[str, str], ...] = ()
    """Variables that the command sets in the environment of the ranks."""
    container: str | None = None
    """The image in which the ranks run."""
    script: tuple[str, ...] = ()
    """The script, or `-m` and a module, and its arguments."""
    starts_one_each: bool = True
    """Whether each task is one process of the training, instead of a launcher that starts several."""
    processes: int | None = 1
    """The processes that each task starts; None for one per GPU."""

    @property
    def name(self) -> str:
        """The program's name without its directory; empty without a program."""
        return PurePath(self.words[0]).name if self.words else ""

    @property
    def shell_text(self) -> str | None:
        """The text that a shell executes: TEXT of `bash -c TEXT`; None for other programs."""
        is_text = self.name in {"bash", "sh"} and re.fullmatch(r"(-l )?-[a-z]*c", " ".join(self.words[1:-1]))
        return self.words[-1] if is_text else None


def read_launch(words: Sequence[str], line: int) -> Launch:
    """Return a command without srun, env, time, exec and the container that stand before its program.

    Raises:
        UserError: a run cannot start a program as the container would.
    """
    launch = Launch(words=tuple(words))
    while launch.name in {"srun", "env", "time", "exec", "apptainer", "singularity"}:
        rest = launch.words[1:]
        if launch.name == "srun":
            at = next((at for at, word in enumerate(rest) if _PROGRAM.fullmatch(word)), 0)
            launch = replace(launch, step=tuple(read_options(rest[:at], line)), words=rest[at:])
        elif launch.name in {"apptainer", "singularity"}:
            launch = _without_container(launch, line)
        else:
            count = next((at for at, word in enumerate(rest) if not re.match(r"\w+=", word)), len(rest))
            exports = ((name, value) for name, _, value in (word.partition("=") for word in rest[:count]))
            launch = replace(launch, exports=(*launch.exports, *exports), words=rest[count:])
    return launch


def _without_container(launch: Launch, line: int) -> Launch:
    words = launch.words[2:]
    at = next((at for at, word in enumerate(words) if _PROGRAM.fullmatch(word)), 0)
    options = [(option.name, option.value) for option in read_options(words[: max(0, at - 1)], line)]
    if (
        launch.words[1:2] != ("exec",)
        or at == 0
        or {name for name, _ in options} - {"nv", "rocm", "bind", "extra-node-info"}
    ):
        raise UserError(f"hpc submit reads {launch.name} exec [--nv] [--bind DIR] IMAGE.sif python script.py alone")
    binds = ",".join(value for _, value in options if value)
    # Apptainer reads both variables, and SingularityCE only its own.
    names = ["APPTAINER_BIND", *(["SINGULARITY_BIND"] if launch.name == "singularity" else [])] if binds else []
    exports = (*launch.exports, *((name, binds) for name in names))
    return replace(launch, words=words[at:], container=words[at - 1], exports=exports)


def read_program(launch: Launch, line: int) -> Launch:
    """Return a command with its script.

    Raises:
        UserError: the command starts something else, or in another way than a run can.
    """
    _check_step(launch)
    words, name = launch.words, launch.name
    while _PYTHON.fullmatch(name) and words[1:2] == ("-u",):  # torchrun always sets -u
        words = (words[0], *words[2:])
    if _PYTHON.fullmatch(name) and words[1:3] in _LAUNCHERS:
        name, words = _LAUNCHERS[words[1:3]], words[2:]
        if words[0] == "torch.distributed.launch" and not {"--use-env", "--use_env"} & set(words):
            raise UserError(f"{words[0]} passes --local-rank, and torchrun sets LOCAL_RANK: write torchrun")
    elif name == "accelerate":
        if words[1:2] != ("launch",):
            raise UserError("accelerate has another command than launch here: delete the line")
        words = words[1:]
    if name in _LAUNCHERS.values():
        return _launcher(launch, words[1:], line, is_accelerate=name == "accelerate")
    if _PYTHON.fullmatch(name):
        if not words[1:] or (words[1].startswith("-") and words[1] != "-m"):
            raise UserError(
                "a run starts a script or a module, and python without options: write python script.py; delete another "
                "line, or type it as --setup if the first node needs it before the training"
            )
        return replace(launch, script=words[1:])
    if name in {"bash", "sh"} or name.endswith(".sh"):
        raise UserError(f"{shlex.join(words[:2])} is a shell script: write its commands into this file")
    raise UserError(
        f"hpc submit does not know what {shlex.join(words)} does: start the training with python or torchrun; delete "
        "another line, or type it as --setup if the first node needs it before the training, or --data PATH if it "
        "copies data"
    )


def _check_step(launch: Launch) -> None:
    """Raise UserError if an option of srun asks for what no run has."""
    for option in launch.step or ():
        if option.name == "chdir":
            raise UserError(
                f"srun {option}: leave it out, and write cd {shlex.quote(option.value)} in a line before it"
            )
        if _SRUN_REFUSED.fullmatch(option.name) and str(option) != "--export=ALL":
            raise UserError(
                f"srun {option}: a run has one program with the whole environment on all of its nodes, and an image by "
                "apptainer exec IMAGE.sif: leave it out"
            )


def _launcher(launch: Launch, words: Sequence[str], line: int, *, is_accelerate: bool) -> Launch:
    """Read the options of torchrun or of accelerate launch, whose names may have dashes or underscores."""
    at = next((at for at, word in enumerate(words) if word.endswith(".py") or word in {"-m", "--module"}), len(words))
    read = read_options(words[:at], line)
    options = {option.name.replace("_", "-"): option.value for option in read}
    script = ("-m", *words[at + 1 :]) if words[at : at + 1] in {("-m",), ("--module",)} else tuple(words[at:])
    if not script or options.keys() & {"no-python", "run-path"}:
        raise UserError("a run starts a Python script or a module: write torchrun script.py")
    processes = _count(options.get("nproc-per-node", "1"))
    if is_accelerate:
        for name in options.keys() - _ACCELERATE_PLACEMENT - _ACCELERATE_EXPORTS.keys():
            raise UserError(
                f"--{name}: torchrun starts the ranks: leave it out, and set it in the script (Accelerator)"
            )
        total, nodes = _count(options.get("num-processes")), _count(options.get("num-machines"))
        processes = total and total // (nodes or 1)
    exports = ((name, options[key]) for key, name in _ACCELERATE_EXPORTS.items() if key in options)
    return replace(
        launch, script=script, starts_one_each=False, processes=processes, exports=(*launch.exports, *exports)
    )


def _count(value: str | None) -> int | None:
    """Return the number of an option; None for `gpu`, `auto`, and what only the job knows."""
    return int(value) if value and value.isdigit() else None
