"""Starts the runs of a scaling study, one size after the other, and follows them. Runs on the login node.

All state is in the runs, so the controller may be killed at any moment and started again.
"""

import time
from collections.abc import Callable

from hpc.base.errors import UserError
from hpc.base.files import number_in, read_json_lines
from hpc.programs.program_flags import StudySize
from hpc.run.events.history import History
from hpc.run.events.kinds import FirstStep
from hpc.slurm.cancellation import cancel_run
from hpc.status.run_view import StatusCache
from hpc.status.summary import TERMINAL, Summary
from hpc.studies.members import Supervision, lacks_job, start_member
from hpc.studies.scaling.measures import Measures, measure
from hpc.studies.scaling.scaling_dir import ScalingDir, ScalingSpec, Size
from hpc.studies.scaling.scaling_result import write_page


class ScalingController:
    """Starts and follows the runs of one study.

    Args:
        study: the directory.
        spec: the spec of the study.
        tell: called with each message for the user.
    """

    def __init__(self, study: ScalingDir, spec: ScalingSpec, tell: Callable[[str], None]) -> None:
        self._study, self._spec, self._tell = study, spec, tell
        self._cache, self._supervision = StatusCache(), Supervision(study, tell)
        self._refused = dict[Size, str]()
        self._ended, self._on_page = set[Size](), set[Size]()

    def step(self) -> bool:
        """Follow the runs, and start further ones. Return whether the study is over.

        Raises:
            UserError: the first run cannot be submitted.
            TorchrelayError: Slurm does not answer.
        """
        missing, running = list[Size](), 0
        self._cache = StatusCache()  # in an old cache, a run that another controller just submitted may look failed
        for size in self._spec.sizes:
            run = self._study.run(size.name)
            summary = self._cache.summary(run) if run.spec.exists() else None
            if summary is None or lacks_job(summary):
                missing.append(size)
            elif size not in self._ended:
                running += self._follow(size, summary)
        if self._study.cancelled.exists():
            return not running
        for size in missing:
            if running < self._spec.parallel and size not in self._refused:
                running += self._start(size)
        self._supervision.check()
        return not running and all(size in self._refused for size in missing)

    def measures(self) -> list[Measures]:
        """Return the measures so far, by size."""
        found = list[Measures]()
        for size in self._spec.sizes:
            run = self._study.run(size.name)
            if run.spec.exists():
                found.append(measure(size, self._spec.mode, run, self._cache.summary(run)))
            else:
                cause = self._refused.get(size)
                found.append(Measures(size=size, run=run.name, state="refused" if cause else "waiting", cause=cause))
        return found

    def write_result(self) -> None:
        """Write the page if a run has ended since it was last written."""
        if self._ended == self._on_page:
            return
        write_page(self._study, self._spec, self.measures())
        self._on_page = {*self._ended}

    def _start(self, size: Size) -> bool:
        """Submit the run of a size. Return False if it is refused; for the first size, raise UserError instead."""
        run, spec = self._study.run(size.name), self._spec
        places = {"nodes": str(size.nodes), "gpus_per_node": str(size.gpus), "ranks": str(size.ranks)}
        asked = StudySize(places=places, growth=spec.growth(size), minutes=spec.minutes)
        gpus = f"{spec.gpu_type}:{size.gpus}" if spec.gpu_type else str(size.gpus)
        try:
            if start_member(
                self._study, spec, run, lambda flags: flags.of_size(asked),
                nodes=str(size.nodes), gpus_per_node=gpus,
            ):  # fmt: skip
                self._tell(f"{run.name} is submitted")
        except UserError as error:
            if size == self._spec.sizes[0]:
                raise
            self._refused[size] = str(error)
            self._tell(f"{run.name} cannot be submitted: {error}")
            return False
        return True

    def _follow(self, size: Size, summary: Summary) -> bool:
        """Return whether the run of a size goes on, and announce its end.

        A script is cancelled when it has trained for the study's minutes. The classifier ends by itself.
        """
        state, run = summary.state, self._study.run(size.name)
        if state in TERMINAL:
            self._ended.add(size)
            measured = measure(size, self._spec.mode, run, summary)
            speed = ""
            if measured.images_per_second:
                speed = f", {measured.images_per_second:.0f} images per second"
            elif measured.steps_per_second:
                speed = f", {measured.steps_per_second:.3g} steps per second"
            self._tell(f"{run.name} is {state}{speed}")
            return False
        if self._spec.script:
            first, steps = next(iter(read_json_lines(run.train_metrics)), {}), History.load(run).of(FirstStep)
            began = number_in(first, "time") or (steps[0].time if steps else None)
            if began is not None and time.time() - began > 60 * self._spec.minutes:
                cancel_run(run, state, final=True)
        return True
