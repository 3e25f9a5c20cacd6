"""`hpc submit`: the command line. Runs on the login node."""

import sys
from collections.abc import Sequence

from hpc.submissions.answer import show
from hpc.submissions.new_run import start_run
from hpc.submissions.options import options_for_help, run_verb, split_script


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb."""
    arguments, script = split_script(list(sys.argv[1:] if argv is None else argv))
    options = options_for_help(arguments, script)
    return run_verb("submit", lambda parsed: show(start_run(parsed, script), parsed), options, arguments, script)
