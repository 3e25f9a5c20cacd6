"""The directory of a group of runs, such as a sweep: its spec, the code, and the start of its runs. Login node."""

import json
from collections.abc import Callable, Mapping
from contextlib import chdir
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import msgspec

from hpc.base import program
from hpc.base.errors import NotNowError, TorchrelayError, UserError
from hpc.base.files import expanded, new_directory, write_json
from hpc.base.program import changed
from hpc.commands import cli
from hpc.programs.program_flags import ProgramFlags
from hpc.run.code_files import CodeFiles
from hpc.run.events.history import History
from hpc.run.ownership import check_is_own
from hpc.run.rundir import RunDir, check_run_name
from hpc.submissions.new_run import start_run
from hpc.submissions.options import SubmitOptions, build, submit_flags
from hpc.submissions.plan import plan
from hpc.submissions.resumed_run import options_of as resumed
from hpc.submissions.resumed_run import resume_run
from hpc.submissions.user_code.code_copy import copy_files
from hpc.submissions.user_code.own_code import UserCode, find_code

# Settings that differ between the runs of a group, or that its runs do not have.
_NOT_COMMON = {"name", "runs-dir", "config", "dry-run", "wait", "help-all", "json", "debug"}


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """The settings that all runs of a group have in common."""

    parallel: int
    """The maximum number of runs at the same time."""
    settings: Mapping[str, Any]
    """Values by flag without dashes, including the user's defaults at the start of the group."""
    script: tuple[str, ...]
    """The user's script and its arguments, which may have `{NAME}` in place of a value that the runs differ in."""
    working_directory: str = "."
    """The directory in which the script starts: below `code/`, or an absolute path if the script runs in place."""
    revision: str | None
    """Git revision of the copied code; None if unknown, or if the script runs in place."""
    started_in: str | None = None
    """The directory in which the group was started, and in which its runs are submitted: relative paths in the settings
    and in the values of runs start there. None, for the current one, in a file of an older version."""

    def check(self) -> None:
        """Raise UserError if a number is not allowed."""
        if self.parallel < 1:
            raise UserError(f"--parallel is {self.parallel}: use 1 or more")


Spec = TypeVar("Spec", bound=GroupSpec)


@dataclass(frozen=True)
class GroupDir(Generic[Spec]):
    """The files of a group, by name. A subclass defines the kind of group."""

    path: Path

    KIND: ClassVar[str]
    """The kind of group: one of `cli.GROUPS`."""
    TITLE: ClassVar[str]
    """The words for this kind of group in a sentence."""
    FIRST_FLAG: ClassVar[str]
    """The flag with which a user starts a group of this kind."""
    SPEC: ClassVar[type[GroupSpec]]

    @classmethod
    def named(cls, name: str | None, runs_dir: Path) -> Self:
        """Return the directory of the group of this name. Raises UserError if the name is missing or not allowed."""
        if name is None:
            raise UserError(
                f"the {cls.TITLE} has no name: add --name NAME; later, hpc {cls.KIND} --name NAME continues it"
            )
        check_run_name(name)
        return cls(expanded(runs_dir).resolve() / name)

    @property
    def spec_file(self) -> Path:
        """The file of the group's spec."""
        return self.path / f"{self.KIND}.json"

    @property
    def code(self) -> Path:
        """The directory with the user's code as it was at the start of the group. Each run gets the same."""
        return self.path / "code"

    @property
    def cancelled(self) -> Path:
        """A file that exists once `hpc cancel` has cancelled the group."""
        return self.path / cli.CANCELLED_GROUP

    def run(self, name: str) -> RunDir:
        """Return a run of the group. Its name begins with the group's, because Slurm and trackers show no groups."""
        return RunDir(self.path / f"{self.path.name}-{name}")

    def save(self, spec: Spec) -> None:
        """Write the group's spec. Raises UserError if it is wrong."""
        spec.check()
        write_json(self.spec_file, asdict(spec))

    def load(self) -> Spec:
        """Read the group's spec. Raises UserError if it is damaged."""
        try:
            # A path that is not UTF-8 is in the file as text that msgspec's own reader refuses.
            return msgspec.convert(json.loads(self.spec_file.read_bytes()), self.SPEC)  # type: ignore[return-value]
        except (OSError, ValueError) as error:
            raise UserError(f"{self.spec_file} is damaged, or of another version: {error}") from error

    def make(self, spec: Spec, code: UserCode) -> None:
        """Make the directory with the spec and the code. Raises UserError if it exists."""
        try:
            with new_directory(self.path) as path:
                draft = type(self)(path)
                if not code.in_place:
                    copy_files(code, draft.code)
                draft.save(spec)
        except FileExistsError as error:
            typed = f"hpc {self.KIND} --name {self.path.name}"
            raise UserError(
                f"{self.path} exists already: choose another --name, or type {typed} to continue it"
            ) from error

    def go_on(self, options: Any) -> Spec:
        """Save and return the spec with the values that `options` has for its fields.

        Takes back a cancellation, but not with --once: cron, which calls with that, does not know of the cancellation.

        Raises UserError if the group does not exist, is another user's, or has a damaged spec.
        """
        if not self.spec_file.exists():
            raise UserError(
                f"there is no {self.TITLE} {self.path.name} in {options.runs_dir}: add {self.FIRST_FLAG} to start one"
            )
        check_is_own(RunDir(self.path))
        values = {field.name: getattr(options, field.name, None) for field in fields(self.SPEC)}
        spec = replace(self.load(), **{name: value for name, value in values.items() if value is not None})
        if not options.once:
            self.cancelled.unlink(missing_ok=True)
        self.save(spec)
        return spec


# --- the runs ---


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
        "started_in": str(Path.cwd()),
    }


def options_of(spec: GroupSpec) -> SubmitOptions:
    """Return the options that the runs of a group have in common."""
    return build(submit_flags(spec.script), spec.settings, spec.script)


@dataclass(frozen=True, kw_only=True)
class Member:
    """A run of a group, by what it differs in."""

    name: str
    change: Callable[[ProgramFlags], ProgramFlags]
    """Changes the flags of the program."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Flags of the launcher without dashes."""
    values: str = ""
    """The values that the run differs in, such as ` with lr=0.1`, where its name does not say them."""


def start_member(group: GroupDir[Any], spec: GroupSpec, member: Member) -> bool:
    """Submit a run of a group.

    If an earlier submission of the run was killed, resume it unchanged. Return False if another process submitted it.

    Raises:
        NotNowError: the run cannot be submitted now, whatever its own flags and values are.
        UserError: the run cannot be submitted with these flags and values.
        TorchrelayError: Slurm does not answer, another process is about to submit the run, or the directory in which
            the group was started is missing.
    """
    run, place = group.run(member.name), Path(spec.started_in or ".")
    is_made = run.spec.exists()
    if not place.is_dir():
        raise TorchrelayError(
            f"{run.name} waits: the {group.TITLE} was started in {place}, which is missing: make it again, or a link"
        )
    with chdir(place):
        try:
            if is_made:
                resume_run(resumed({"run": str(run.path)}))
            else:
                _submit_member(group, spec, run, member)
        except UserError as error:
            # After a refusal by Slurm, the run would have no job or, if new, no spec: another process has submitted it.
            if History.load(run).last_job_id if is_made else run.spec.exists():
                return False
            if is_made:
                raise
            kind = UserError if _is_own(group, spec, run, member, error) else NotNowError
            raise kind(str(error)) from error
    return True


def _is_own(group: GroupDir[Any], spec: GroupSpec, run: RunDir, member: Member, error: UserError) -> bool:
    """Return whether a new run is refused for its own flags and values, and not for what the group has in common."""
    try:
        plan(_options(group, spec, run))
    except NotNowError:
        return False
    except UserError as other:
        return str(other) != str(error)
    # sbatch may refuse a size of a scaling study for its nodes, but no trial of a sweep for its values.
    return bool(member.flags) or not isinstance(error, NotNowError)


def _options(group: GroupDir[Any], spec: GroupSpec, run: RunDir, own: Mapping[str, Any] | None = None) -> SubmitOptions:
    """Return the options of a run without its own values of the program."""
    script = spec.script
    if script[:1] not in {(), ("-m",)}:
        # The path of the script is made absolute, so that it is found in the group's copy of the code.
        script = (str(group.code / spec.working_directory / script[0]), *script[1:])
    flags = {"name": run.name, "runs-dir": group.path, **(own or {})}
    return build(submit_flags(script), {**spec.settings, **flags}, script)


def _submit_member(group: GroupDir[Any], spec: GroupSpec, run: RunDir, member: Member) -> None:
    options, place = _options(group, spec, run, member.flags), spec.working_directory
    flags = member.change(options.program)
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
