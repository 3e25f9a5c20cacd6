"""Keeps torch's compiler out of a rank that compiles nothing. Runs on every rank, before the optimizer is made.

Optimizers and DDP load `torch._dynamo` only to ask it to leave them alone. With it come sympy and all of
`torch._inductor`: 1.2 of the 3.1 CPU seconds and 145 of the 750 MB of a rank of a small training (torch 2.15, CPU),
again at every restart.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

_COMPILER = "torch._dynamo"
_Function = TypeVar("_Function", bound=Callable[..., object])


class _Absent(ModuleType):
    """Stands for a module of the compiler until somebody wants more of it than what is set here."""

    def __getattr__(self, name: str) -> Any:
        """What the real one has, which is loaded for that; but for questions that are asked of every module."""
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if isinstance(sys.modules.get(_COMPILER), _Absent):
            del sys.modules[_COMPILER]
        return getattr(importlib.import_module(self.__name__), name)


def leave_out_compiler() -> None:
    """Answer for the compiler what torch asks of it where nothing is compiled. No effect if it is loaded already."""
    if _COMPILER in sys.modules:
        return
    rules, utils = (_Absent(f"{_COMPILER}.{name}") for name in ("trace_rules", "utils"))
    vars(rules)["clear_lru_cache"] = _nothing
    vars(utils)["get_optimize_ddp_mode"] = lambda: "ddp_optimizer"
    compiler = _Absent(_COMPILER)
    vars(compiler).update(disable=_as_it_is, graph_break=_nothing, trace_rules=rules, utils=utils)
    sys.modules[_COMPILER] = compiler


def _nothing(*_: object) -> None:
    """There is no graph to break, and no cache to clear."""


def _as_it_is(function: _Function, *_: object, **__: object) -> _Function:
    """A function that is not to be compiled is not compiled."""
    return function
