"""`hpc completion SHELL`: print a script that completes verbs, flags and their values. Runs on the login node."""

import importlib
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Union

import tyro

from hpc.__main__ import PROGRAMS, module_of
from hpc.base import help_text
from hpc.base.errors import lacking_classifier
from hpc.base.flags import POSITIONAL
from hpc.commands import cli

# For each command, the class of its flags, preceded by the class's module if that is not the command's own module.
OPTIONS = {
    "submit": "SubmitTraining", "status": "StatusOptions", "logs": "LogsOptions",
    "cancel": "CancelOptions", "resume": "ResumeTraining", "fork": "ForkTraining", "evaluate": "EvaluateOptions",
    "report": "ReportOptions", "sweep": "SweepTraining", "scaling": "ScalingTraining", "shell": "ShellOptions",
    "sync": "SyncOptions", "clean": "CleanOptions", "supervise": "SuperviseOptions",
    "doctor": "DoctorOptions", "drill": "DrillOptions",
    "notify": "NotifyOptions", "config": "ConfigOptions", "completion": "CompletionOptions", "testbed": "Verb",
    "train": "training.config.command_line:TrainOptions", "pack": "training.pack.__main__:PackOptions",
    "predict": "training.inference.predict:PredictOptions", "export": "training.inference.export:ExportOptions",
    "profile": "training.profile:ProfileOptions", "verify": "training.verify_resume.__main__:VerifyOptions",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CompletionOptions(cli.Common):
    """Print a completion script for your shell, which completes the commands, flags and values of hpc.

    For example:
      hpc completion bash > ~/.local/share/bash-completion/completions/hpc
      hpc completion zsh > ~/.zfunc/_hpc    (with `fpath+=~/.zfunc` before compinit in ~/.zshrc)
      hpc completion fish > ~/.config/fish/completions/hpc.fish
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], POSITIONAL]
    """Your shell: bash, zsh or fish."""


def completion(options: CompletionOptions) -> int:
    """Print the script that tyro generates. Without the classifier, it knows none of the classifier's programs."""
    absent = PROGRAMS.keys() if lacking_classifier() else ()
    verbs: Any = tuple(
        Annotated[_without_texts(options_of(verb)), tyro.conf.subcommand(name=verb, prefix_name=False)]
        for verb in OPTIONS
        if verb not in absent
    )
    union: Any = Union[verbs]  # noqa: UP007 - the union of a tuple
    with suppress(SystemExit):  # tyro exits with 0
        tyro.cli(union, args=["--tyro-write-completion", options.shell, "-"], prog="hpc", config=help_text.TYRO)
    return 0


def _without_texts(options: Any) -> Any:
    """Return options without help texts, because tyro's scripts would offer the second line of a text as a word.

    The defaults are left out, too: fish passes all flags of all verbs in one argument, which Linux limits to 128 KiB.
    """
    nothing = tyro.conf.arg(help="", help_behavior_hint="")
    return help_text.annotated(options, lambda _: nothing)


def options_of(command: str) -> Any:
    """Return the dataclass of a command's flags, or the union of its subcommands' dataclasses."""
    module, _, name = OPTIONS[command].rpartition(":")
    return getattr(importlib.import_module(module or module_of(command)), name)


main = partial(cli.run, completion, CompletionOptions, "completion")
