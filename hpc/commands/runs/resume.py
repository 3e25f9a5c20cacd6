"""`hpc resume`: continue a run, and print what has changed. Runs on the login node."""

from collections.abc import Sequence

from hpc.base import program
from hpc.base.text import visible
from hpc.commands import cli
from hpc.programs.program_kinds import DEFAULT
from hpc.slurm import handover
from hpc.submissions import resumed_run
from hpc.submissions.options import with_program
from hpc.submissions.sbatch.sbatch_advice import explain

_OF_THE_RESUMPTION = {"run", "runs_dir", "new_code", "wait", "json", "debug"}


ResumeOptions = with_program(resumed_run.ResumeOptions, DEFAULT.ADJUSTABLE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hpc resume`, and return its exit code."""
    of_the_run = {field.name for field in program.flags(ResumeOptions)} - _OF_THE_RESUMPTION
    return cli.run(
        resume, ResumeOptions, "resume", argv, complete=resumed_run.options_of, refused=(DEFAULT,), explain=explain,
        inherited=of_the_run,
    )  # fmt: skip


def resume(options: resumed_run.ResumeOptions) -> int:
    """Resume the run, and print what has changed; with --wait, wait for the end. Returns the exit code."""
    run, answer = resumed_run.resume_run(options)
    if options.wait:
        from hpc.status.printing import wait_for_end  # noqa: PLC0415 - draws with rich, which only this needs

        return wait_for_end(run, answer if options.json else None)
    if options.json:
        cli.print_json(answer)
        return 0
    step = handover.last_step(run)
    print(visible(f"run {run.name} continues in job {answer['job_id']}" + (f" after step {step}" if step else "")))
    for name, value in answer["changed"].items():
        print(visible(f"  {name} {value}"))
    return 0
