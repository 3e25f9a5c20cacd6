"""`hpc VERB ...`, the same as `python -m hpc.VERB ...`. Runs on the login node."""

import difflib
import importlib
import sys

# Only the verb's own module is imported: `hpc cancel` must not wait for what `hpc submit` needs.
VERBS = {
    "submit": "submit a training run",
    "status": "table of runs",
    "logs": "output of the ranks",
    "supervise": "restart interrupted runs: requeue, release, resubmit",
    "cancel": "end runs",
    "resume": "continue a run after hpc cancel or a failure, or train it longer",
    "fork": "a new run from another one's newest checkpoint, with other flags",
    "clean": "list or remove what old runs hold",
    "report": "HTML page about a run, or a comparison of several",
    "stage": "staged copies of data sets on this machine",
    "doctor": "find settings of the cluster that cost runs work or time",
    "drill": "cause a failure in a run and measure its cost",
    "testbed": "a real Slurm on this machine",
}
_FILES = {"cancel", "clean", "fork", "resume", "stage"}


def main() -> int:
    """Run the verb and return its exit code."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in {"-h", "--help"}:
        print("usage: hpc VERB [FLAGS]    (hpc VERB --help lists the flags)\n")
        print("\n".join(f"  {verb:<11}{summary}" for verb, summary in VERBS.items()))
        return 0 if arguments else 2
    verb = arguments[0]
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(VERBS)}"
        print(f"hpc: there is no verb {verb!r}: {hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"hpc.{verb}" if verb in _FILES else f"hpc.{verb}.__main__")
    return int(module.main(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main())
