"""`hpc config`: the defaults of each flag of `hpc submit`, and where they come from. Runs on the login node."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from hpc.base.flag_files import default_files, overlay
from hpc.commands import cli
from hpc.submissions.options import user_defaults


@dataclass(frozen=True, kw_only=True)
class ConfigOptions(cli.Common):
    """Show the defaults of hpc submit that differ from the built-in defaults, and where they come from.

    Two YAML files set defaults, the site's and yours: the line `partition: gpu` sets the default of --partition.
    Variables of sbatch, such as SBATCH_PARTITION, override both files.
    """


def config(environment: Mapping[str, str], options: ConfigOptions) -> int:
    """Print each default and where it comes from."""
    values, merged = dict[str, tuple[Any, str]](), dict[str, Any]()
    for one in user_defaults(environment):
        for name in one.settings:
            sources = [values[name][1]] if name in merged and isinstance(merged[name], list) else []
            values[name] = (overlay(merged, one.settings)[name], ", ".join([*sources, one.source]))
        merged = overlay(merged, one.settings)
    if options.json:
        flags = [{"flag": name, "value": value, "source": source} for name, (value, source) in sorted(values.items())]
        cli.print_json({"flags": flags})
        return 0
    for path in default_files():
        print(f"{path}{'' if os.path.lexists(path) else ' (does not exist)'}")
    table = Table("flag", *(Column(name, overflow="fold") for name in ("default", "from")), box=None)
    for name, (value, source) in sorted(values.items()):
        shown = " ".join(value) if isinstance(value, list) else str(value)
        table.add_row(f"--{name}", Text(shown), Text(source))
    if table.rows:
        Console().print(table)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hpc config`, and return its exit code."""
    # `cli.run` removes the variables of sbatch, so they are read before.
    return cli.run(partial(config, dict(os.environ)), ConfigOptions, "config", argv)
