"""Keeps torch's compiler out of a process that compiles nothing. Runs in torchrun, and on ranks that it does not fork.

Optimizers and DDP import `torch._dynamo`, which imports `torch._inductor` and sympy, only to exclude their own code
from compilation. These are 900 modules, which take almost as long as all other modules of torch (torch 2.15, CPU).
Read in torch 2.11 and 2.15.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"


class _StandIn(ModuleType):
    """Stands for a module of the compiler. If it lacks a name, it is replaced by the compiler, which has the name."""

    def __getattr__(self, name: str) -> Any:
        # Python asks any module for special names.
        if name.startswith("__"):
            raise AttributeError(name)
        _import_compiler()
        return getattr(importlib.import_module(self.__name__), name)


class _PartFinder(MetaPathFinder, Loader):
    """Imports the compiler before a part of it. Without this, the part would be executed a second time."""

    def find_spec(self, fullname: str, _path: object, _target: object = None) -> ModuleSpec | None:
        """Return a spec that yields the part as the compiler has imported it."""
        if not fullname.startswith(f"{_COMPILER}.") or not isinstance(sys.modules.get(_COMPILER), _StandIn):
            return None
        _import_compiler()
        part = importlib.import_module(fullname)
        # Python would ignore the spec returned here if the part were known.
        sys.modules.pop(fullname)
        return ModuleSpec(fullname, self, loader_state=(part, part.__spec__))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the part."""
        part: ModuleType = spec.loader_state[0]
        return part

    def exec_module(self, module: ModuleType) -> None:
        """Give the part its own spec again; it has been executed."""
        if module.__spec__ is not None and module.__spec__.loader is self:
            module.__spec__ = module.__spec__.loader_state[1]


def _import_compiler() -> None:
    """Replace all stand-ins by the compiler."""
    for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
        sys.modules.pop(name, None)
    importlib.import_module(_COMPILER)


def leave_out_compiler() -> None:
    """Let a stand-in answer torch's calls of the compiler. Does nothing if the compiler has been imported."""
    if _COMPILER in sys.modules:
        return
    rules, utils, compiler = (_StandIn(name) for name in (f"{_COMPILER}.trace_rules", f"{_COMPILER}.utils", _COMPILER))
    vars(rules)["clear_lru_cache"] = _do_nothing
    # "ddp_optimizer" is the default. torchvision imports the other name for an operation of detection models.
    vars(utils).update(get_optimize_ddp_mode=lambda: "ddp_optimizer", is_compile_supported=lambda _device: False)
    vars(compiler).update(disable=_disable, graph_break=_do_nothing, trace_rules=rules, utils=utils)
    vars(compiler)["__path__"] = []  # Python asks finders for parts of modules that have it
    sys.modules.update({_COMPILER: compiler, utils.__name__: utils})
    sys.meta_path.insert(0, _PartFinder())


def _do_nothing(*_: object) -> None:
    """Replace functions that only change what is compiled."""


def _disable(function: Callable[..., object] | None = None, *_: object, **__: object) -> Callable[..., object]:
    """Return a function that must not be compiled, or without one, a decorator for such functions."""
    return _disable if function is None else function
