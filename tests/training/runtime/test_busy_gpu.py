"""A GPU that is busy for a while delays the start; a GPU that stays busy makes its node bad."""

import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.fake_slurm import write_programs
from support.trainings import needs_compiler, needs_no_gpu_driver
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, but not in __all__

from hpc.base.errors import BadNodeError, TorchrelayError
from training.engine import preflight
from training.runtime import busy_gpu, rank_device
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RankInfo

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
    monkeypatch.setattr(busy_gpu, "_PAUSE_SECONDS", 0.0)

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
    monkeypatch.setattr(busy_gpu, "_LIMIT_SECONDS", 0.0)
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


def test_the_processes_on_a_gpu_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_programs(tmp_path, **{"nvidia-smi": "echo 'GPU-8c1f-a1, 4711, 812 MiB'\necho 'GPU-8c1f-b2, 9, 5 MiB'"})
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert busy_gpu.processes_on("8c1f-a1") == ["PID 4711 (812 MiB)"]
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert busy_gpu.processes_on("8c1f-a1") == []


@needs_compiler
@needs_no_gpu_driver
def test_a_node_is_bad_if_its_driver_goes_on_refusing_and_else_the_rank_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In this test's processes, the driver is a library that works once there is a file.
    works, source = tmp_path / "works", tmp_path / "driver.c"
    source.write_text(
        f'#include <unistd.h>\nint cuInit(unsigned flags) {{ return access("{works}", F_OK) ? 2 : 0; }}\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("TORCHRELAY_DEVICE", "cuda")
    monkeypatch.setattr(rank_device, "why_no_gpu", lambda: "torch cannot use the driver: Error 2: out of memory")
    monkeypatch.setattr(busy_gpu, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(busy_gpu, "_LIMIT_SECONDS", 0.5)
    rank = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, restarts=0)
    with pytest.raises(BadNodeError, match="cannot use the driver: Error 2: out of memory"):
        rank_device.find_device(rank, HashStore())
    works.touch()
    with pytest.raises(TorchrelayError, match="refused this process, but accepts new ones") as raised:
        rank_device.find_device(rank, HashStore())
    assert raised.value.exit_code == TorchrelayError.exit_code
