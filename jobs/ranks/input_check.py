"""Checks a node's staged copy when a rank says that its input is bad: the copy may be damaged, not the input.

Runs on compute nodes.
"""

import threading
from collections.abc import Callable, Sequence

from msgspec import structs

from hpc.base.errors import TorchrelayError
from hpc.run.causes import Cause
from hpc.run.events.kinds import RankFailed
from jobs.node_attempt import log


class InputCheck:
    """Holds back the failures of ranks with bad input until this node's copy is verified, once in an attempt."""

    def __init__(self, replace_damaged: Callable[[], int]) -> None:
        """Prepare the check. `replace_damaged` reads the whole copy, and returns the number of files that it replaced.

        It runs in a thread, because it takes minutes for a large copy.
        """
        self._replace_damaged = replace_damaged
        self._held = list[RankFailed]()
        self._thread: threading.Thread | None = None
        self._damaged = 0

    def explained(self, failures: Sequence[RankFailed]) -> list[RankFailed]:
        """Return the failures to report now. Those that a damaged copy has caused are crashes, not bad input."""
        suspects = [failure for failure in failures if failure.cause is Cause.BAD_INPUT]
        if not suspects and not self._held:
            return list(failures)
        if self._thread is None:
            log("a rank says that its input is bad: the copy of the data on this node is verified")
            self._thread = threading.Thread(target=self._check, daemon=True, name="input-check")
            self._thread.start()
        others = [failure for failure in failures if failure not in suspects]
        self._held += suspects
        if self._thread.is_alive():
            return others
        held, self._held = self._held, []
        damaged, self._damaged = self._damaged, 0
        if not damaged:
            return [*held, *others]
        told = f"the copy of the data on this node was damaged ({damaged} files), and has been replaced"
        log(told)
        # The ranks that were restarted meanwhile have failed for the same reason.
        return [structs.replace(held[0], cause=Cause.CRASHED, detail=f"{held[0].detail}: {told}"), *others]

    def _check(self) -> None:
        try:
            self._damaged = self._replace_damaged()
        except (TorchrelayError, OSError) as error:
            log(f"the copy of the data on this node could not be verified: {error}")
