"""`hpc completion SHELL`: print a script that completes verbs, flags and their values. Runs on the login node."""

import importlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from hpc.__main__ import PROGRAMS, module_of
from hpc.base import program
from hpc.base.errors import lacking_classifier
from hpc.base.flags import POSITIONAL
from hpc.commands import cli

# For each command, the class of its flags, preceded by the class's module if that is not the command's own module.
OPTIONS = {
    "submit": "hpc.submissions.options:SubmitTraining", "status": "StatusOptions", "logs": "LogsOptions",
    "cancel": "CancelOptions", "resume": "ResumeOptions", "fork": "ForkOptions", "evaluate": "EvaluateOptions",
    "report": "ReportOptions", "sweep": "SweepTraining", "scaling": "ScalingTraining", "shell": "ShellOptions",
    "sync": "SyncOptions", "clean": "CleanOptions", "supervise": "SuperviseOptions",
    "doctor": "DoctorOptions", "smoke": "SmokeOptions", "drill": "DrillOptions",
    "notify": "NotifyOptions", "config": "ConfigOptions", "completion": "CompletionOptions",
    "testbed": "TestbedOptions", "train": "training.config.command_line:TrainOptions",
    "pack": "training.pack.__main__:PackOptions",
    "predict": "training.inference.predict:PredictOptions", "export": "training.inference.export:ExportOptions",
    "profile": "training.profile:ProfileOptions", "verify": "training.verify_resume.__main__:VerifyOptions",
}  # fmt: skip


# How each shell asks the program of sh that `_candidates` writes. It completes file names if no candidate fits.
_SCRIPTS = {
    "bash": """_hpc() {
  local candidates=$(sh -c 'CANDIDATES' hpc "${COMP_WORDS[@]:1:COMP_CWORD-1}")
  COMPREPLY=($(compgen -W "$candidates" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _hpc hpc torchrelay""",
    "zsh": """#compdef hpc torchrelay
compadd -- $(sh -c 'CANDIDATES' hpc "${(@)words[2,CURRENT-1]}") || _files""",
    "fish": """function _hpc
  set -l words (commandline -opc)
  sh -c 'CANDIDATES' hpc $words[2..-1] | string split -n ' '
end
for name in hpc torchrelay
  complete -c $name -a '(_hpc)'
  complete -c $name -f -n 'test (count (commandline -opc)) = 1'
end""",
}


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
    """Print the script. Without the classifier, it knows none of the classifier's programs."""
    absent = PROGRAMS.keys() if lacking_classifier() else ()
    candidates = "\n".join(_candidates([command for command in OPTIONS if command not in absent]))
    print(_SCRIPTS[options.shell].replace("CANDIDATES", candidates))
    return 0


def _candidates(commands: list[str]) -> Iterator[str]:
    """Yield the lines of a program of sh that prints what may follow the words that it gets."""
    yield 'for last do [ "$last" = -- ] && exit; done'  # The words of a user's script follow.
    yield "case $1 in"
    yield f'"") echo {" ".join(commands)};;'
    for command in commands:
        fields = list(program.flags(options_of(command)))
        positional = [field for field in fields if program.mark_of(field).is_positional]
        flags = {f"--{program.flag_name(field)}": field for field in fields if field not in positional}
        yield f"{command}) case $last in"
        for flag, field in flags.items():
            if field.type is not bool:
                spellings = "|".join(filter(None, (program.mark_of(field).letter, flag)))
                yield f"{spellings}) echo {' '.join(program.choices_of(field))};;"
        yield f"*) echo {' '.join([*itertools.chain(*map(program.choices_of, positional)), *flags])};;"
        yield "esac;;"
    yield "esac"


def options_of(command: str) -> type[Any]:
    """Return the dataclass of a command's flags."""
    module, _, name = OPTIONS[command].rpartition(":")
    options: type[Any] = getattr(importlib.import_module(module or module_of(command)), name)
    return options


main = partial(cli.run, completion, CompletionOptions, "completion")
