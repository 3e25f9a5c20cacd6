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
from hpc.submissions.sbatch.sbatch_advice import ALONE, LETTERS

_SRUN_LETTERS = {**LETTERS, "-K": "kill-on-bad-exit", "-l": "label", "-u": "unbuffered", "-T": "threads",
                 "-r": "relative", "-I": "immediate", "-X": "disable-status", "-E": "preserve-env"}  # fmt: skip
_SRUN_NO_VALUE = {
    *ALONE, "disable-status", "exact", "immediate", "kill-on-bad-exit", "label", "multi-prog", "no-allocate", "no-kill",
    "overlap", "preserve-env", "propagate", "pty", "quiet", "unbuffered", "verbose", "whole",
}  # fmt: skip
_SRUN_REFUSED = re.compile(r"array|het-group|multi-prog|nodelist|relative|container.*|export")
# The options of torchrun and accelerate that have no value. All others have one.
_LAUNCHER_NO_VALUE = {
    "debug", "m", "module", "multi-gpu", "no-python", "q", "quiet", "run-path", "same-network", "standalone", "use-env",
    "virtual-local-rank",
}  # fmt: skip
_ACCELERATE_EXPORTS = {
    "mixed-precision": "ACCELERATE_MIXED_PRECISION", "num-cpu-threads-per-process": "OMP_NUM_THREADS",
    "gradient-accumulation-steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
}  # fmt: skip
# The options of Accelerate's launcher that only place the ranks.
_ACCELERATE_PLACEMENT = {
    "debug", "gpu-ids", "log-dir", "m", "machine-rank", "main-process-ip", "main-process-port", "max-restarts",
    "module", "monitor-interval", "multi-gpu", "num-machines", "num-processes", "q", "quiet", "rdzv-backend",
    "rdzv-conf", "role", "same-network", "tee",
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
    nodes: int | None = None
    """The number of nodes that the launcher expects, if the command says it."""

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
            options, program = read_options(rest, line, _SRUN_LETTERS, _SRUN_NO_VALUE)
            launch = replace(launch, step=tuple(options), words=tuple(program))
        elif launch.name in {"apptainer", "singularity"}:
            launch = _without_container(launch, line)
        else:
            count = next((at for at, word in enumerate(rest) if not re.match(r"\w+=", word)), len(rest))
            exports = ((name, value) for name, _, value in (word.partition("=") for word in rest[:count]))
            launch = replace(launch, exports=(*launch.exports, *exports), words=rest[count:])
    return launch


def _without_container(launch: Launch, line: int) -> Launch:
    options, rest = read_options(launch.words[2:], line, {"-B": "bind"}, {"nv", "rocm"})
    if launch.words[1:2] != ("exec",) or not rest or {option.name for option in options} - {"nv", "rocm", "bind"}:
        raise UserError(f"hpc submit reads {launch.name} exec [--nv] [--bind DIR] IMAGE.sif python script.py alone")
    binds = (("APPTAINER_BIND", option.value) for option in options if option.name == "bind")
    return replace(launch, words=tuple(rest[1:]), container=rest[0], exports=(*launch.exports, *binds))


def read_program(launch: Launch, line: int) -> Launch:
    """Return a command with its script.

    Raises:
        UserError: the command starts something else, or in another way than a run can.
    """
    for option in launch.step or ():
        if _SRUN_REFUSED.fullmatch(option.name) and str(option) != "--export=ALL":
            raise UserError(
                f"srun {option}: a run has one program with the whole environment on all of its nodes, and an image by "
                "apptainer exec IMAGE.sif: leave it out"
            )
    words = launch.words
    is_python = re.fullmatch(r"python[\d.]*", launch.name)
    while is_python and words[1:2] == ("-u",):  # torchrun always sets -u
        words = (words[0], *words[2:])
    module = words[2] if is_python and words[1:2] == ("-m",) and len(words) > 2 else ""  # noqa: PLR2004 - -m MODULE
    if launch.name == "torchrun" or module == "torch.distributed.run":
        return _launcher(launch, words[3 if module else 1 :], line)
    if module == "torch.distributed.launch":
        if not {"--use-env", "--use_env"} & set(words):
            raise UserError(
                "torch.distributed.launch passes --local-rank, and torchrun sets LOCAL_RANK: write torchrun"
            )
        return _launcher(launch, words[3:], line)
    if (launch.name == "accelerate" and words[1:2] == ("launch",)) or module == "accelerate.commands.launch":
        return _launcher(launch, words[3 if module else 2 :], line, is_accelerate=True)
    if is_python and (module or (words[1:] and not words[1].startswith("-"))):
        return replace(launch, script=words[1:])
    if is_python:
        raise UserError("a run starts a script or a module, and python without options: write python script.py")
    if launch.name in {"bash", "sh"} or launch.name.endswith(".sh"):
        raise UserError(f"{shlex.join(words[:2])} is a shell script: write its commands into this file")
    raise UserError(
        f"hpc submit does not know what {words[0]} does: start the training with python or torchrun; delete another "
        "line, or type it as --setup if the first node needs it before the training, or --data PATH if it copies data"
    )


def _launcher(launch: Launch, words: Sequence[str], line: int, *, is_accelerate: bool = False) -> Launch:
    """Read the options of torchrun or of accelerate launch, whose names may have dashes or underscores."""
    named = [re.sub(r"^--?[\w-]+", lambda match: match[0].replace("_", "-"), word) for word in words]
    letters = {"-m": "m", "-q": "q", "-r": "redirects", "-t": "tee"}
    read, rest = read_options(named, line, letters, _LAUNCHER_NO_VALUE)
    options, script = {option.name: option.value for option in read}, tuple(words[len(words) - len(rest) :])
    if not script or options.keys() & {"no-python", "run-path"}:
        raise UserError("a run starts a Python script or a module: write torchrun script.py")
    nodes, processes = (_count(options.get(name)) for name in ("nnodes", "nproc-per-node"))
    if is_accelerate:
        for name in options.keys() - _ACCELERATE_PLACEMENT - _ACCELERATE_EXPORTS.keys():
            raise UserError(
                f"--{name}: torchrun starts the ranks: leave it out, and set it in the script (Accelerator)"
            )
        nodes, total = (_count(options.get(name)) for name in ("num-machines", "num-processes"))
        processes = total and total // (nodes or 1)
    elif "nproc-per-node" not in options:
        processes = 1
    return replace(
        launch, script=("-m", *script) if options.keys() & {"m", "module"} else script, starts_one_each=False,
        processes=processes, nodes=nodes,
        exports=(*launch.exports, *((name, options[key]) for key, name in _ACCELERATE_EXPORTS.items() if key in options)),
    )  # fmt: skip


def _count(value: str | None) -> int | None:
    """Return the number of an option; None for `gpu`, `auto`, and what only the job knows."""
    return int(value) if value and value.isdigit() else None
