"""Keeps torch's compiler out of a process that compiles nothing. Runs in torchrun, and on ranks that it does not fork.

Optimizers and DDP import `torch._dynamo`, which imports `torch._inductor` and sympy, only to exclude their own code
from compilation. These are 900 modules, which take almost as long as all other modules of torch (torch 2.15, CPU).
Read in torch 2.15.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"


class _StandIn(ModuleType):
    """Stands for a module of the compiler. If it lacks a name, it is replaced by the compiler, which has the name."""

    def __getattr__(self, name: str) -> Any:
        # Python asks any module for special names. It asks for the compiler's `__path__` to import a part of it.
        if name.startswith("__") and (self.__name__, name) != (_COMPILER, "__path__"):
            raise AttributeError(name)
        for module_name in [each for each, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[module_name]
        return getattr(importlib.import_module(self.__name__), name)


def leave_out_compiler() -> None:
    """Let a stand-in answer torch's calls of the compiler. Does nothing if the compiler has been imported."""
    if _COMPILER in sys.modules:
        return
    rules, utils, compiler = (_StandIn(name) for name in (f"{_COMPILER}.trace_rules", f"{_COMPILER}.utils", _COMPILER))
    vars(rules)["clear_lru_cache"] = _do_nothing
    # "ddp_optimizer" is the default. torchvision imports the other name for an operation of detection models.
    vars(utils).update(get_optimize_ddp_mode=lambda: "ddp_optimizer", is_compile_supported=lambda _device: False)
    vars(compiler).update(disable=_disable, graph_break=_do_nothing, trace_rules=rules, utils=utils)
    sys.modules.update({_COMPILER: compiler, utils.__name__: utils})


def _do_nothing(*_: object) -> None:
    """Replace functions that only change what is compiled."""


def _disable(function: Callable[..., object] | None = None, *_: object, **__: object) -> Callable[..., object]:
    """Return a function that must not be compiled, or without one, a decorator for such functions."""
    return _disable if function is None else function
