"""The entry point of `hpc VERB ...`: finds the verb's module in `hpc.commands` and runs it. Runs on the login node."""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

from hpc.base.environment import CALLED
from hpc.base.text import did_you_mean

# Only the verb's own module is imported: `hpc cancel` must not wait for what `hpc submit` needs.
_START = {
    "submit": "submit a training run, your own script, or a batch script of sbatch",
    "status": "list runs, or show one in detail",
    "logs": "print the output of a run's ranks",
    "cancel": "stop runs; hpc resume continues them",
}
_RUNS = {
    "resume": "continue a run after hpc cancel or a failure, or train it longer",
    "fork": "start a new run from another run's newest checkpoint, with other flags",
    "evaluate": "evaluate the model of a run on any data",
    "report": "write an HTML page about a run, or compare several",
    "sweep": "search for the best settings, with a run for each trial",
    "scaling": "run the same training on several numbers of nodes and compare the speed",
    "shell": "open a shell on a node of a run",
    "sync": "send a run's metrics to Weights & Biases or MLflow",
    "clean": "list the disk use of old runs, or remove them",
}
_CLUSTER = {
    "supervise": "watch the queue and restart interrupted runs sooner",
    "doctor": "find cluster settings, and slow nodes, that will cost your runs work or time",
    "drill": "cause a failure in a run and measure the recovery",
    "notify": "send a test message to the recipients of hpc submit --notify",
    "config": "show the default flags and the files that set them",
    "testbed": "run a real Slurm on this machine (needs root)",
}
_GROUPS = {"start": _START, "runs": _RUNS, "cluster": _CLUSTER}
VERBS = {**_START, **_RUNS, **_CLUSTER}
# The classifier's programs. Without `hpc`, `python -m MODULE` would import a `training` in the current directory.
PROGRAMS = {
    "train": ("training", "train on this machine, without Slurm"),
    "predict": ("training.inference.predict", "predict the classes of images"),
    "export": ("training.inference.export", "write a trained model as one file"),
    "pack": ("training.pack", "decode an image folder once, for all later trainings"),
    "profile": ("training.profile", "find the bottleneck of a training"),
    "verify": ("training.verify_resume", "check that an interrupted training ends with the same bits"),
}
_RENAMED = {"smoke": "use hpc doctor --nodes N", "preflight": "use hpc doctor --nodes 1"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the verb and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["help"]:  # hpc help COMMAND is hpc COMMAND --help
        arguments = [*arguments[1:2], "--help"]
    verb = arguments[0] if arguments else ""
    if verb in {"", "-h", "--help"}:
        _print_help()
        return 0 if verb else 2
    if verb in {"-V", "--version"}:
        from importlib.metadata import version  # noqa: PLC0415  # slow to import, and rarely needed

        print(f"torchrelay {version('torchrelay')} ({Path(__file__).parent})")
        return 0
    if verb in PROGRAMS:
        return _run_program(verb, arguments[1:])
    if verb not in VERBS:
        others = ["help", *VERBS, *PROGRAMS]
        hint = _RENAMED.get(verb) or did_you_mean(verb, others, "hpc help lists the commands", 1)
        print(f"hpc: there is no command {verb!r}: {hint}", file=sys.stderr)
        return 2
    _import_own_packages()
    return int(importlib.import_module(module_of(verb)).main(arguments[1:]))


def _import_own_packages() -> None:
    """Import our packages `jobs` and `training` next to `hpc`: PYTHONPATH may name a user's packages of these names."""
    for name in ("jobs", "training"):
        spec = PathFinder.find_spec(name, [str(Path(__file__).parents[1])])
        if spec and spec.loader and name not in sys.modules:
            sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])


def module_of(verb: str) -> str:
    """Return the name of the module of a verb."""
    group = next(group for group, verbs in _GROUPS.items() if verb in verbs)
    return f"hpc.commands.{group}.{verb}"


def _print_help() -> None:
    print("Torchrelay submits PyTorch training to Slurm and keeps it running.\n")
    print("usage: hpc COMMAND [FLAGS]    (hpc help COMMAND lists its flags, hpc --version the version)")
    programs = {name: summary for name, (_, summary) in PROGRAMS.items()}
    for title, commands in (
        ("start here", _START), ("more about runs", _RUNS), ("cluster and settings", _CLUSTER),
        ("image classifier, on this machine", programs),
    ):  # fmt: skip
        print(f"\n{title}:", *(f"  {name:<11}{summary}" for name, summary in commands.items()), sep="\n")
    print("\nfor example:\n  hpc submit --nodes 2 --gpus-per-node 4 --time 12h -- train.py --lr 0.1")


def _run_program(verb: str, arguments: list[str]) -> int:
    """Replace this process by a program of the classifier. With -P, it imports nothing of the current directory."""
    # The processes of multiprocessing inherit -P: they, too, import modules by name.
    command = [sys.executable, "-P", "-m", PROGRAMS[verb][0], *arguments]
    return os.execve(sys.executable, command, {**os.environ, CALLED: f"hpc {verb}"})  # noqa: S606 - no shell


if __name__ == "__main__":
    sys.exit(main())
