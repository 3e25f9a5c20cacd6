"""`hpc submit`: its command line and its output. Runs on the login node."""

import sys
from collections.abc import Sequence
from pathlib import Path

from hpc import cli
from hpc.spec import RunSpec
from hpc.submit.cluster_choice import this_machine
from hpc.submit.dry_run import show_dry_run, starting_place
from hpc.submit.new_run import NewRun, start_run
from hpc.submit.options import SubmitOptions, options_for_help, run_verb, split_script
from training.config.dataset_layout import title_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb."""
    arguments, script = split_script(list(sys.argv[1:] if argv is None else argv))
    options = options_for_help(arguments, script)
    return run_verb("submit", lambda parsed: show(start_run(parsed, script), parsed), options, arguments, script)


def show(new: NewRun, options: SubmitOptions) -> int:
    """Print the new run; with --wait, wait for its end. Returns the exit code."""
    if options.dry_run:
        show_dry_run(new.run, new.spec, new.answer, as_json=options.json)
        return 0
    if not options.json:
        print(*_data_line(new.spec), _first_line(new), sep="\n")
        if new.spec.script:
            print(f"  {starting_place(new.run, new.spec)}")
        sys.stdout.flush()
    if options.wait:
        # A mere submission need not load rich.
        from hpc.status.__main__ import wait_for_end  # noqa: PLC0415

        return wait_for_end(new.run, new.answer if options.json else None)
    if options.json:
        cli.print_json(new.answer)
    else:
        print(f"  {new.run.path}")
        cli.print_next(new.run, "status", "logs --follow", "cancel")
    return 0


def _data_line(spec: RunSpec) -> list[str]:
    if spec.training is None or spec.data is None or (title := title_of(Path(spec.data))) is None:
        return []
    return [f"training {spec.training.train.model} on {title}; use --data PATH for your own images"]


def _first_line(new: NewRun) -> str:
    run, spec = new.run, new.spec
    # With --gpus-per-node 0 on Slurm, the user expects the CPU: no note.
    on_cpu = spec.device != "cuda" and (spec.cluster == "local" or spec.resources.num_gpus > 0)
    where = "; its ranks use the CPU" if on_cpu else ""
    if spec.cluster == "slurm":
        return f"submitted run {run.name} as job {new.job_id}{where}"
    return f"started run {run.name} on {this_machine()}, as process {new.job_id}{where}"


if __name__ == "__main__":
    sys.exit(main())
