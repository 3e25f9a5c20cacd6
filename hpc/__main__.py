"""`hpc VERB ...`, the same as `python -m hpc.VERB ...`. Runs on the login node."""

import difflib
import importlib
import sys
from collections.abc import Callable

# The verb's module is imported only when it is typed: `hpc cancel` must not wait for what `hpc submit` needs.
VERBS = {
    "submit": "check a run, make its directory, queue it",
    "status": "a table of runs",
    "logs": "what the ranks printed",
    "supervise": "see that runs go on: requeue, resubmit, take over from dead nodes",
    "cancel": "end a run for good",
    "report": "a page about a run, or a comparison of several",
    "stage": "the copies of data sets on this machine",
    "doctor": "what in this cluster's configuration will hurt",
    "drill": "break a run on purpose, and see what that costs",
    "testbed": "a real Slurm on this machine",
}
_FILES = {"cancel", "stage"}


def main() -> int:
    """Dispatch to the verb; the exit code is the verb's."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in {"-h", "--help"}:
        print("usage: hpc VERB ...; hpc VERB --help tells more\n")
        print("\n".join(f"  {verb:<10}{does}" for verb, does in VERBS.items()))
        return 0 if arguments else 2
    verb = arguments[0]
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, n=1) or list(VERBS)
        print(f"hpc: there is no verb {verb!r}: use {' or '.join(close)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"hpc.{verb}" if verb in _FILES else f"hpc.{verb}.__main__")
    run: Callable[[list[str]], int] = module.main
    return run(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
