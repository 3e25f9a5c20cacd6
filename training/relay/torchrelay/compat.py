"""Uses what a library does not offer by a public name. Runs on every rank.

tests/runs/test_library_callbacks_cluster.py fails without it.
"""

from typing import Any


def lightning_loader(trainer: Any) -> Any:
    """Return the loader that was given to Lightning's `fit`: its hooks see none before the first epoch has begun."""
    return getattr(trainer.fit_loop._data_source, "instance", None)  # noqa: SLF001
