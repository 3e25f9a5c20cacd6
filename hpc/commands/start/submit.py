"""`hpc submit`: the command line. Runs on the login node."""

import sys
from collections.abc import Sequence

from hpc.base import program
from hpc.submissions.answer import show
from hpc.submissions.new_run import start_run
from hpc.submissions.options import SubmitOptions, run_verb, split_script
from hpc.submissions.sbatch.typed_file import replace_file


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb."""
    typed, typed_script = split_script(list(sys.argv[1:] if argv is None else argv))

    def work() -> int:
        arguments, script = replace_file(typed, typed_script)
        return run_verb("submit", lambda options: show(start_run(options), options), SubmitOptions, arguments, script)

    return program.run(work, "hpc submit", typed)
