"""Starts the runs of a group, such as a sweep, with common settings. Runs on the login node."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc.base import program
from hpc.base.errors import UserError
from hpc.base.program import changed
from hpc.commands import cli
from hpc.programs.program_flags import ProgramFlags
from hpc.run.code_files import CodeFiles
from hpc.run.events.history import History
from hpc.run.rundir import RunDir
from hpc.studies.group import GroupDir, GroupSpec
from hpc.submissions.new_run import start_run
from hpc.submissions.options import SubmitOptions, build, submit_flags
from hpc.submissions.resumed_run import options_of as resumed
from hpc.submissions.resumed_run import resume_run
from hpc.submissions.user_code.own_code import UserCode, find_code

# Settings that differ between the runs of a group, or that its runs do not have.
_NOT_COMMON = {"name", "runs-dir", "config", "dry-run", "wait", "help-all", "json", "debug"}


def common(options: SubmitOptions, code: UserCode) -> dict[str, Any]:
    """Return the fields of a GroupSpec but `parallel`, with the user's defaults and files as they are now.

    Raises UserError if the program is not installed: a group without it would have no run.
    """
    options.program.check_installed()
    # The runs of the group would look for these names in the group's directory, so replace them by paths.
    after, after_ok = (
        tuple(str(cli.find_run(name, options.runs_dir).path) for name in names)
        for names in (options.after, options.after_ok)
    )
    options = replace(options, after=after, after_ok=after_ok)
    kind, asked = submit_flags(code.script), program.values_of(options)
    own = {name: asked[name] for name in program.default_values(kind) if name not in _NOT_COMMON}
    return {
        "settings": changed(own, kind),
        "script": code.script,
        "working_directory": str(code.root / code.working_directory) if code.in_place else code.working_directory,
        "revision": None if code.in_place else code.revision,
    }


def options_of(spec: GroupSpec) -> SubmitOptions:
    """Return the options that the runs of a group have in common."""
    return build(submit_flags(spec.script), spec.settings, spec.script)


def start_member(
    group: GroupDir[Any],
    spec: GroupSpec,
    run: RunDir,
    change: Callable[[ProgramFlags], ProgramFlags],
    flags: Mapping[str, Any],
) -> bool:
    """Submit a run of a group with its own `flags` of the launcher, after a change of the program's flags.

    If an earlier submission of the run was killed, resume it unchanged. Return False if another process submitted it.
    Raises UserError if the run cannot be submitted; or TorchrelayError if Slurm does not answer, or another process is
    about to submit the run.
    """
    is_made = run.spec.exists()
    try:
        if is_made:
            resume_run(resumed({"run": str(run.path)}))
        else:
            _submit_member(group, spec, run, change, flags)
    except UserError:
        # After a refusal by Slurm, the run would have no job or, if new, no spec. So another process has submitted it.
        if History.load(run).last_job_id if is_made else run.spec.exists():
            return False
        raise
    return True


def _submit_member(
    group: GroupDir[Any],
    spec: GroupSpec,
    run: RunDir,
    change: Callable[[ProgramFlags], ProgramFlags],
    own: Mapping[str, Any],
) -> None:
    own = {"name": run.name, "runs-dir": group.path, **own}
    place, script = spec.working_directory, spec.script
    if script[:1] not in {(), ("-m",)}:
        # The path of the script is made absolute, so that it can be checked from any current directory.
        script = (str(group.code / place / script[0]), *script[1:])
    options = build(submit_flags(script), {**spec.settings, **own}, script)
    flags = change(options.program)
    within = (*spec.script[:1], *flags.script[1:])
    if Path(place).is_absolute():
        code = find_code(Path(place), within, elsewhere=True, in_place=True)
    else:
        record = CodeFiles.load(group.code)
        code = UserCode(
            root=group.code, top=group.code / (record.top if record else "."), working_directory=place, script=within,
            copied_from=group.code, copied_revision=spec.revision,
        )  # fmt: skip
    start_run(replace(options, program=flags), code=code)
