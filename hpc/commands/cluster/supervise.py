"""`hpc supervise`: watch squeue and keep runs going. Runs on the login node, as a daemon or from cron.

It keeps no state of its own: `observe` reads the queue and the run directories, `decide` chooses an action, `perform`
does it. It may be killed at any moment and restarted. Two supervisors do no harm: before it submits a job, a supervisor
creates the file that claims the job, and only one of them can create it.
"""

import functools
import json
import time

from hpc.base.errors import UserError
from hpc.base.text import visible
from hpc.commands import cli
from hpc.supervise.check import Line, SuperviseOptions, check_runs
from hpc.supervise.decide import Action


def supervise(options: SuperviseOptions) -> int:
    """Check all runs and act, once or until Ctrl-C. With --once, returns 1 if an action failed."""
    if options.interval.seconds < 1:
        raise UserError(f"--interval is {options.interval}: use 1s or more")
    if options.once or options.dry_run:
        lines = check_runs(options)
        _print(lines, options)
        return int(any(line["problem"] for line in lines))
    seconds = options.interval.seconds
    cli.repeat("hpc supervise", seconds, lambda: _print(check_runs(options), options), fatal=BrokenPipeError)
    return 0


def _print(lines: list[Line], options: SuperviseOptions) -> None:
    """Print the actions and problems. With --dry-run or --once --json, also print the runs that are left alone."""
    if options.json and (options.once or options.dry_run):
        cli.print_json(lines)
        return
    for line in lines:
        if line["action"] == Action.KEEP and not line["problem"] and not options.dry_run:
            continue
        problem = f": {line['problem']}" if line["problem"] else ""
        text = f"{time.strftime('%F %T')} {line['run']}: {line['action']} ({line['reason']}){problem}"
        print(json.dumps(cli.versioned(line)) if options.json else visible(text), flush=True)


main = functools.partial(cli.run, supervise, SuperviseOptions, "supervise")
