"""Reads the command that starts a training in a batch script: python, torchrun or accelerate, perhaps with srun.

Pure; runs on the login node.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from hpc.base.errors import UserError
from hpc.submissions.sbatch.batch_options import Option, read_options
from hpc.submissions.sbatch.sbatch_advice import ALONE, LETTERS

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_SHELLS = {"bash", "sh", "zsh", "ksh"}
_SRUN_LETTERS = {**LETTERS, "-K": "kill-on-bad-exit", "-l": "label", "-u": "unbuffered", "-T": "threads",
                 "-r": "relative", "-I": "immediate", "-X": "disable-status", "-E": "preserve-env"}  # fmt: skip
_SRUN_NO_VALUE = {
    *ALONE, "disable-status", "exact", "immediate", "kill-on-bad-exit", "label", "multi-prog", "no-allocate", "no-kill",
    "overlap", "preserve-env", "propagate", "pty", "quiet", "unbuffered", "verbose", "whole",
}  # fmt: skip
_SRUN_REFUSED = {
    "array": "job arrays are not supported", "het-group": "heterogeneous jobs are not supported",
    "multi-prog": "a run has one program", "nodelist": "a run uses all of its nodes",
    "relative": "a run uses all of its nodes",
}  # fmt: skip
# The options of torchrun and accelerate that have no value. All others have one.
_TORCHRUN_ALONE = {"standalone", "no-python", "run-path", "module", "m", "virtual-local-rank", "use-env"}
_ACCELERATE_ALONE = {
    "module", "m", "no-python", "multi-gpu", "cpu", "use-deepspeed", "use-fsdp", "use-megatron-lm", "use-mps-device",
    "same-network", "debug", "quiet", "q", "dynamo-use-fullgraph", "dynamo-use-dynamic", "enable-cpu-affinity",
}  # fmt: skip
# What Accelerate's launcher exports for its options, and what it exports nothing for.
_ACCELERATE_EXPORTS = {
    "mixed-precision": "ACCELERATE_MIXED_PRECISION", "num-cpu-threads-per-process": "OMP_NUM_THREADS",
    "gradient-accumulation-steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
}  # fmt: skip
_ACCELERATE_REFUSED = {
    "config-file": "torchrun reads no configuration of Accelerate: write its settings as options of accelerate launch",
    "use-deepspeed": "DeepSpeed through Accelerate was not tried",
    "use-fsdp": "set FullyShardedDataParallelPlugin in the script",
    "use-megatron-lm": "Megatron-LM through Accelerate was not tried", "cpu": "leave it out, and ask for no GPUs",
    "no-python": "a run starts a Python script",
}  # fmt: skip
_PLACEMENT = {
    "debug", "dynamo-backend", "gpu-ids", "log-dir", "m", "machine-rank", "main-process-ip", "main-process-port",
    "max-restarts", "module", "monitor-interval", "multi-gpu", "num-machines", "num-processes", "q", "quiet",
    "rdzv-backend", "rdzv-conf", "role", "same-network", "tee",
}  # fmt: skip
_OTHER_IMAGES = "--container takes an Apptainer image: write apptainer exec IMAGE.sif python script.py"
_REFUSED = {
    **dict.fromkeys(("mpirun", "mpiexec", "ibrun", "horovodrun"), "write srun python script.py, without MPI"),
    **dict.fromkeys(("shifter", "podman-hpc", "enroot", "docker"), _OTHER_IMAGES),
    **dict.fromkeys(("uv", "poetry", "pixi"), "write ENV/bin/python script.py"),
    "deepspeed": "write torchrun --nproc-per-node N script.py, which sets LOCAL_RANK, too",
    "conda": "write conda activate ENV before the program",
    "ray": "it starts processes of its own", "numactl": "leave it out", "nsys": "leave it out",
}  # fmt: skip
_TORCHRUN_MODULES = {"torch.distributed.run", "torch.distributed.launch"}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The command that starts a training."""

    script: tuple[str, ...]
    """The script, or `-m` and a module, and its arguments."""
    python: str
    """The program as typed, which tells the Python: `python3`, `torchrun`, `/home/me/env/bin/accelerate`."""
    starts_one_each: bool = True
    """Whether each task is one process of the training, instead of a launcher that starts several."""
    processes: int | None = 1
    """The processes that each task starts; None for one per GPU."""
    total: int | None = None
    """The processes of the whole job, if the command says it."""
    nodes: int | None = None
    """The number of nodes that the launcher expects, if the command says it."""
    step: tuple[Option, ...] | None = None
    """The options of srun; None without srun."""
    exports: tuple[str, ...] = ()
    """Lines that set what the launcher would set in the environment of the ranks."""
    container: str | None = None
    """The image in which the ranks run."""


@dataclass(frozen=True, kw_only=True)
class ShellText:
    """The text that a command has a shell execute: `bash -c TEXT`."""

    text: str
    step: tuple[Option, ...] | None = None
    """The options of srun; None without srun."""


def without_srun(words: Sequence[str], line: int) -> Sequence[str]:
    """Return a command line without srun and its options."""
    return read_options(words[1:], line, _SRUN_LETTERS, _SRUN_NO_VALUE)[1] if words[:1] == ["srun"] else words


def is_launcher(words: Sequence[str]) -> bool:
    """Return whether a command may start a training."""
    name = PurePath(words[0]).name
    if name == "conda":
        return words[1:2] == ["run"]
    if name == "env":
        return any(is_launcher([word]) for word in words[1:] if word != "env")
    return name in {*_READERS, *_SHELLS, *_REFUSED} or bool(_PYTHON.fullmatch(name)) or name.endswith((".sh", ".py"))


def read_launch(words: Sequence[str], line: int) -> Launch | ShellText:
    """Return the training that a command starts, or the text that it has a shell execute.

    Raises:
        UserError: the command starts something else, or in another way than a run can. The message does not name the
            line.
    """
    name, rest = PurePath(words[0]).name if words else "", words[1:]
    if _PYTHON.fullmatch(name):
        return _python(words[0], rest, line)
    if name in _READERS:
        return _READERS[name](words[0], rest, line)
    if name in _SHELLS and (text := _shell_text(rest)) is not None:
        return ShellText(text=text)
    if name in _REFUSED:
        raise UserError(f"hpc submit does not start programs with {name}: {_REFUSED[name]}")
    if name in _SHELLS or name.endswith(".sh"):
        raise UserError(f"{shlex.join(words[:2])} is a shell script: write its commands into this file")
    raise UserError(
        f"{words[0] if words else 'srun'} is not a program that hpc submit starts: write python or torchrun"
    )


def _shell_text(words: Sequence[str]) -> str | None:
    """Return the text after the option -c of a shell; None if a file follows."""
    options = [word for word in words[:2] if re.fullmatch(r"-[a-z]*c|-l|--login", word)]
    return words[len(options)] if options and options[-1].endswith("c") and len(words) == len(options) + 1 else None


def _python(program: str, words: Sequence[str], line: int) -> Launch:
    exports, at = list[str](), 0
    while at < len(words) and words[at].startswith("-") and words[at] not in {"-m", "-c", "-"}:
        if words[at] not in {"-u", "-O", "-B"}:  # torchrun always sets -u
            raise UserError(f"a run starts python without {words[at]}: leave it out, or set it by a variable (export)")
        exports += {"-O": ["export PYTHONOPTIMIZE=1"], "-B": ["export PYTHONDONTWRITEBYTECODE=1"]}.get(words[at], [])
        at += 1
    words = words[at:]
    if words[:1] == ["-m"] and words[1:2] and words[1] in _TORCHRUN_MODULES:
        if words[1].endswith("launch") and not {"--use-env", "--use_env"} & set(words):
            raise UserError(
                "torch.distributed.launch passes --local-rank, and torchrun sets LOCAL_RANK: write torchrun"
            )
        return _torchrun(program, words[2:], line)
    if words[:1] == ["-m"] and words[1:2] == ["accelerate.commands.launch"]:
        return _accelerate(program, ["launch", *words[2:]], line)
    if not words or words[0] in {"-c", "-"} or words == ["-m"]:
        raise UserError("a run starts a script or a module: write python script.py")
    return Launch(script=tuple(words), python=program, exports=tuple(exports))


def _launcher_options(words: Sequence[str], line: int, alone: set[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the options of a launcher of Python scripts, with dashes in their names, and the script."""
    named = [re.sub(r"^--?[\w-]+", lambda match: match[0].replace("_", "-"), word) for word in words]
    options, rest = read_options(named, line, {"-m": "m", "-q": "q", "-r": "redirects", "-t": "tee"}, alone)
    script = tuple(words[len(words) - len(rest) :])
    found = {option.name: option.value for option in options}
    if not script:
        raise UserError("there is no script after the options: write script.py")
    return found, ("-m", *script) if found.keys() & {"m", "module"} else script


def _count(value: str | None) -> int | None:
    """Return the number of an option; None for `gpu`, `auto`, and what only the job knows."""
    return int(value) if value and value.isdigit() else None


def _torchrun(program: str, words: Sequence[str], line: int) -> Launch:
    options, script = _launcher_options(words, line, _TORCHRUN_ALONE)
    if wrong := options.keys() & {"no-python", "run-path"}:
        raise UserError(f"--{min(wrong)}: a run starts a Python script or a module: leave it out")
    return Launch(
        script=script, python=program, starts_one_each=False, processes=_count(options.get("nproc-per-node", "1")),
        nodes=_count(options.get("nnodes")),
    )  # fmt: skip


def _accelerate(program: str, words: Sequence[str], line: int) -> Launch:
    if words[:1] != ["launch"]:
        raise UserError("accelerate has another command than launch here: delete the line")
    options, script = _launcher_options(words[1:], line, _ACCELERATE_ALONE)
    for name in options.keys() - _PLACEMENT - _ACCELERATE_EXPORTS.keys():
        raise UserError(f"--{name}: {_ACCELERATE_REFUSED.get(name, 'set it in the script (Accelerator)')}")
    if options.get("dynamo-backend", "no").lower() != "no":
        raise UserError("--dynamo-backend: call torch.compile in the script")
    exports = [
        f"export {name}={shlex.quote(options[key])}" for key, name in _ACCELERATE_EXPORTS.items() if key in options
    ]
    return Launch(
        script=script, python=program, starts_one_each=False, processes=None,
        total=_count(options.get("num-processes")), nodes=_count(options.get("num-machines")), exports=tuple(exports),
    )  # fmt: skip


def _srun(_: str, words: Sequence[str], line: int) -> Launch | ShellText:
    options, rest = read_options(words, line, _SRUN_LETTERS, _SRUN_NO_VALUE)
    for option in options:
        if option.name.startswith("container"):
            raise UserError(
                f"srun {option}: --container takes an Apptainer image: write apptainer exec IMAGE.sif python"
            )
        if option.name in _SRUN_REFUSED:
            raise UserError(f"srun {option}: {_SRUN_REFUSED[option.name]}")
        if option.name == "export" and option.value != "ALL":
            raise UserError(f"srun {option}: the ranks have the whole environment: write export lines before srun")
    launch = read_launch(rest, line)
    return replace(launch, step=tuple(options))


def _apptainer(program: str, words: Sequence[str], line: int) -> Launch:
    exports, at = list[str](), 1
    if words[:1] != ["exec"]:
        raise UserError(f"{program} has another command than exec: write {program} exec IMAGE.sif python script.py")
    while at < len(words) and words[at].startswith("-"):
        name, _, value = words[at].partition("=")
        if name in {"-B", "--bind"}:
            at += not value
            exports.append(f"export APPTAINER_BIND={shlex.quote(value or words[at])}")
        elif name not in {"--nv", "--rocm"}:
            raise UserError(f"{program} {words[at]}: hpc submit --container does not set it: leave it out")
        at += 1
    launch = read_launch(words[at + 1 :], line)
    if isinstance(launch, ShellText):
        raise UserError(f"{program} starts a shell: write {program} exec {words[at]} python script.py")
    return replace(launch, container=words[at], exports=(*launch.exports, *exports))


def _env(_: str, words: Sequence[str], line: int) -> Launch | ShellText:
    count = next((at for at, word in enumerate(words) if not re.match(r"\w+=", word)), len(words))
    launch = read_launch(words[count:], line)
    if isinstance(launch, ShellText):
        raise UserError("env with a shell is not understood: write export lines")
    settings = (word.partition("=") for word in words[:count])
    lines = (f"export {name}={shlex.quote(value)}" for name, _, value in settings)
    return replace(launch, exports=(*lines, *launch.exports))


def _rest(_: str, words: Sequence[str], line: int) -> Launch | ShellText:
    return read_launch(words, line)


_READERS: dict[str, Callable[[str, Sequence[str], int], Launch | ShellText]] = {
    "srun": _srun, "torchrun": _torchrun, "accelerate": _accelerate, "apptainer": _apptainer, "singularity": _apptainer,
    "env": _env, "time": _rest, "exec": _rest,
}  # fmt: skip
