"""A GPU that is busy for a while delays the start; a GPU that stays busy makes its node bad."""

import platform
from collections.abc import Callable

import pytest
import torch

from hpc.base.errors import BadNodeError
from training.engine import preflight
from training.runtime import rank_device
from training.runtime.process_group import ProcessGroup

PASSING = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 MiB."),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.fixture
def fail_preflight(monkeypatch: pytest.MonkeyPatch) -> Callable[[RuntimeError, int], None]:
    """Let the next computations of the preflight fail, `times` times."""
    compute = preflight.count_wrong
    monkeypatch.setattr(rank_device, "_PAUSE_SECONDS", 0.0)

    def fail(error: RuntimeError, times: int) -> None:
        errors = [error] * times

        def count(*args: object, **options: object) -> int:
            if errors:
                raise errors.pop()
            return compute(*args, **options)  # type: ignore[arg-type]  # passed on unchanged

        monkeypatch.setattr(preflight, "count_wrong", count)

    return fail


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_a_gpu_that_is_busy_for_a_while_is_waited_for(
    group: ProcessGroup,
    fail_preflight: Callable[[RuntimeError, int], None],
    error: RuntimeError,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail_preflight(error, 2)
    assert preflight.run_preflight(group).world_size == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"warning: {platform.node()}: {str(error).splitlines()[0]}: trying again for 60 s"


def test_a_gpu_that_stays_busy_makes_its_node_a_bad_one(
    group: ProcessGroup, fail_preflight: Callable[[RuntimeError, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_device, "_LIMIT_SECONDS", 0.0)
    fail_preflight(PASSING[0], 1_000_000)
    with pytest.raises(BadNodeError, match="cannot use its GPUs: after 0 s still CUDA "):
        preflight.run_preflight(group)


def test_an_error_that_does_not_pass_is_not_waited_for(
    group: ProcessGroup, fail_preflight: Callable[[RuntimeError, int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    fail_preflight(RuntimeError("CUDA error: an illegal memory access was encountered"), 1)
    with pytest.raises(BadNodeError, match="illegal memory access"):
        preflight.run_preflight(group)
    assert not capsys.readouterr().err
