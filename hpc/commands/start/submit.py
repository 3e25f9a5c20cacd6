"""`hpc submit`: the command line. Runs on the login node."""

import sys
from collections.abc import Sequence

from hpc.submissions.new_run import show, start_run
from hpc.submissions.options import SubmitOptions, run_verb, split_script
from hpc.submissions.sbatch.typed_file import SubmitFile, with_file


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hpc submit`, and return its exit code."""
    words, script = split_script(list(sys.argv[1:] if argv is None else argv))

    def submit(options: SubmitOptions) -> int:
        return show(start_run(options), options)

    return run_verb("submit", submit, SubmitFile, words, script, lambda typed: with_file(typed, words, script))
