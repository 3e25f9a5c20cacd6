"""`hpc VERB ...`, the same as `python -m hpc.VERB ...`. Runs on the login node."""

import difflib
import importlib
import os
import sys
from typing import NoReturn

# Only the verb's own module is imported: `hpc cancel` must not wait for what `hpc submit` needs.
VERBS = {
    "submit": "submit a training run",
    "status": "table of runs",
    "logs": "output of the ranks",
    "supervise": "restart interrupted runs: requeue, release, resubmit",
    "shell": "a shell on a node of a run",
    "top": "what each rank uses of its GPU and CPUs now",
    "cancel": "end runs",
    "resume": "continue a run after hpc cancel or a failure, or train it longer",
    "fork": "a new run from another one's newest checkpoint, with other flags",
    "evaluate": "evaluate a run's model, or an exported one, on any data",
    "clean": "list or remove what old runs hold",
    "scaling": "the same run on several numbers of nodes, and what each gains",
    "sweep": "a run for each of many settings, to find the best",
    "report": "HTML page about a run, or a comparison of several",
    "sync": "send metrics to Weights & Biases or MLflow",
    "stage": "staged copies of data sets on this machine",
    "config": "defaults of hpc submit, and where they come from",
    "completion": "what makes bash, zsh or fish complete verbs and flags",
    "notify": "try the recipients of hpc submit --notify",
    "smoke": "measure nodes, their devices, disks and network; name what is slow",
    "doctor": "find settings of the cluster that cost runs work or time",
    "drill": "cause a failure in a run and measure its cost",
    "testbed": "a real Slurm on this machine",
}
_FILES = {
    "cancel",
    "clean",
    "completion",
    "config",
    "evaluate",
    "fork",
    "notify",
    "resume",
    "shell",
    "stage",
    "sync",
    "top",
}
# Programs of the trainer, each the same as `python -m MODULE`, which a `training` in the current directory would hide.
PROGRAMS = {
    "train": ("training", "train on this machine"),
    "pack": ("training.pack", "decode an image folder once, for all trainings"),
    "predict": ("training.predict", "predict the classes of images"),
    "export": ("training.export", "write a trained model as one file"),
    "profile": ("training.profile", "find the bottleneck of a training"),
    "verify": ("training.verify_resume", "prove that an interrupted training ends with the same bits"),
    "preflight": ("training.engine.preflight", "check that this machine's device computes correctly"),
}


def main() -> int:
    """Run the verb and return its exit code."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in {"-h", "--help"}:
        programs = {name: summary for name, (_, summary) in PROGRAMS.items()}
        print("usage: hpc VERB [FLAGS]    (hpc VERB --help lists the flags)")
        for title, summaries in (("runs and the cluster", VERBS), ("the trainer, here", programs)):
            print(f"\n{title}:", *(f"  {name:<11}{summary}" for name, summary in summaries.items()), sep="\n")
        return 0 if arguments else 2
    verb = arguments[0]
    if verb in PROGRAMS:
        _run_program(verb, arguments[1:])
    if verb not in VERBS:
        known = [*VERBS, *PROGRAMS]
        close = difflib.get_close_matches(verb, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}"
        print(f"hpc: there is no verb {verb!r}: {hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"hpc.{verb}" if verb in _FILES else f"hpc.{verb}.__main__")
    return int(module.main(arguments[1:]))


def _run_program(verb: str, arguments: list[str]) -> NoReturn:
    """Become a program of the trainer, as `python -m` does, but never one of the current directory."""
    # -P also for the processes that it starts: multiprocessing's import by name, too.
    command = [sys.executable, "-P", "-m", PROGRAMS[verb][0], *arguments]
    os.execve(sys.executable, command, {**os.environ, "TORCHRELAY_CALLED": f"hpc {verb}"})  # noqa: S606 - no shell


if __name__ == "__main__":
    sys.exit(main())
