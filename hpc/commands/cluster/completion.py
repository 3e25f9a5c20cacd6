"""`hpc completion SHELL`: print a script that completes verbs, flags and their values. Runs on the login node."""

import argparse
import importlib
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, Literal

import shtab

from hpc.__main__ import PROGRAMS, VERBS, module_of
from hpc.base import program
from hpc.base.errors import lacking_classifier
from hpc.base.flags import POSITIONAL
from hpc.commands import cli
from hpc.programs.program_flags import ProgramFlags
from hpc.programs.program_kinds import DEFAULT
from hpc.submissions.options import with_program

# The modules and classes of the programs' flags. The class of a command's flags is named after the command.
_OF_PROGRAMS = {
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
    """Print the script. Without the classifier, it knows none of the classifier's programs."""
    root = argparse.ArgumentParser("hpc")
    commands = root.add_subparsers()
    programs = {} if lacking_classifier() else {name: summary for name, (_, summary) in PROGRAMS.items()}
    for command, summary in (VERBS | programs).items():
        parser = commands.add_parser(command, help=summary)
        texts = program.flag_texts(options_of(command))
        # hpc evaluate has flags of its own in place of some of the program's.
        for field in {field.name: field for field in program.offered(options_of(command))}.values():
            first, _, _ = " ".join(texts[field.name].split()).partition(". ")
            action = program.add_flag(parser, field, first.replace("%", "%%"))
            if field.type is not bool and not action.choices:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(root, options.shell))
    return 0


def options_of(command: str) -> type[Any]:
    """Return the dataclass of a command's flags, with those of the default program if it submits any."""
    own = f"{module_of(command)}:{command.capitalize()}Options" if command in VERBS else _OF_PROGRAMS[command]
    module, _, name = own.partition(":")
    options: type[Any] = getattr(importlib.import_module(module), name)
    takes_any = any(field.type is ProgramFlags for field in fields(options))
    return with_program(options, DEFAULT) if takes_any else options


main = partial(cli.run, completion, CompletionOptions, "completion")
