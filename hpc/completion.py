"""`hpc completion SHELL`: print the script with which a shell completes verbs and flags. Runs on the login node."""

import importlib
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Union, get_args

import tyro

from hpc import cli
from hpc.core import program

# Where the flags of each verb are.
OPTIONS = {
    "submit": "hpc.submit.options:SubmitTraining", "status": "hpc.status.__main__:StatusOptions",
    "logs": "hpc.logs.__main__:LogsOptions", "supervise": "hpc.supervise.__main__:SuperviseOptions",
    "cancel": "hpc.cancel:CancelOptions", "resume": "hpc.resume:ResumeOptions", "fork": "hpc.fork:ForkOptions",
    "evaluate": "hpc.evaluate:EvaluateOptions",
    "clean": "hpc.clean:CleanOptions", "report": "hpc.report.__main__:ReportOptions",
    "stage": "hpc.stage:StageOptions",
    "scaling": "hpc.scaling.__main__:ScalingTraining",
    "sweep": "hpc.sweep.__main__:SweepTraining", "sync": "hpc.sync:SyncOptions", "config": "hpc.config:ConfigOptions",
    "notify": "hpc.notify:NotifyOptions", "shell": "hpc.shell:ShellOptions", "top": "hpc.top:TopOptions",
    "smoke": "hpc.smoke.__main__:SmokeOptions",
    "doctor": "hpc.doctor.__main__:DoctorOptions", "drill": "hpc.drill.__main__:DrillOptions",
    "testbed": "hpc.testbed.__main__:Verb", "completion": "hpc.completion:CompletionOptions",
    "train": "training.config.command_line:TrainOptions", "pack": "training.pack.__main__:PackOptions",
    "predict": "training.predict:PredictOptions", "export": "training.export:ExportOptions",
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

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """Your shell: bash, zsh or fish."""


def completion(options: CompletionOptions) -> int:
    """Print the script that tyro generates."""
    verbs: Any = tuple(
        Annotated[_without_texts(options_of(verb)), tyro.conf.subcommand(name=verb, prefix_name=False)]
        for verb in OPTIONS
    )
    union: Any = Union[verbs]  # noqa: UP007 - the union of a tuple
    with suppress(SystemExit):  # tyro exits with 0
        tyro.cli(union, args=["--tyro-write-completion", options.shell, "-"], prog="hpc", config=program.TYRO)
    return 0


def _without_texts(options: Any) -> Any:
    """Leave out the help of flags: tyro's scripts would offer the second line of a text as a word.

    Leave out defaults too: fish passes all flags of all verbs to Python in one argument, which Linux limits to 128 KiB.
    """
    nothing = tyro.conf.arg(help="", help_behavior_hint="")
    return options if get_args(options) else program.annotated(options, lambda _: nothing)


def options_of(command: str) -> Any:
    """Return the dataclass of a command's flags, or the union of its subcommands' dataclasses."""
    module, _, name = OPTIONS[command].partition(":")
    return getattr(importlib.import_module(module), name)


main = partial(cli.run, completion, CompletionOptions, "completion")

if __name__ == "__main__":
    sys.exit(main())
