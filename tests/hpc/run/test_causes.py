"""The causes of an attempt's end, as tables."""

from dataclasses import replace

import pytest

from hpc.run.causes import EXIT_CODES, Cause, Ending, JobState, cause_of, cause_of_exit, is_consequence
from hpc.run.restart_budget import PastInterruption, budget_after, must_requeue

QUIET = Ending(finished=False, cancelled=False, signal=None, job_state=JobState.RUNNING, preempted=False)


@pytest.mark.parametrize(
    ("changes", "cause", "requeue"),
    [
        ({"finished": True, "signal": "SIGTERM", "preempted": True}, Cause.COMPLETED, False),
        ({"cancelled": True, "signal": "SIGTERM"}, Cause.CANCELLED, False),
        ({"job_state": JobState.CANCELLED, "signal": "SIGTERM"}, Cause.CANCELLED, False),
        ({"preempted": True, "signal": "SIGTERM"}, Cause.PREEMPTED, True),
        ({"preempted": True, "signal": "SIGTERM", "job_state": JobState.PENDING}, Cause.PREEMPTED, False),
        ({"preempted": True, "signal": "SIGTERM", "job_state": JobState.CANCELLED}, Cause.PREEMPTED, True),
        ({"job_state": JobState.PREEMPTED}, Cause.PREEMPTED, True),
        ({"signal": "SIGUSR2"}, Cause.TIME_LIMIT, True),
        ({"signal": "SIGTERM", "job_state": JobState.TIMEOUT}, Cause.TIME_LIMIT, True),
        ({"signal": "SIGTERM", "job_state": JobState.PENDING}, Cause.REQUEUED, False),
        ({"signal": "SIGTERM"}, Cause.REQUEUED, True),
        ({"signal": "SIGTERM", "job_state": JobState.NODE_FAIL}, Cause.NODE_FAILURE, False),
        ({}, Cause.CRASHED, True),
        ({"failure": Cause.HANG}, Cause.HANG, True),
        ({"failure": Cause.HANG, "signal": "SIGTERM"}, Cause.REQUEUED, True),
        ({"failure": Cause.BAD_INPUT}, Cause.BAD_INPUT, False),
    ],
)
def test_cause_and_requeue(changes: dict[str, object], cause: Cause, requeue: bool) -> None:
    ending = replace(QUIET, **changes)  # type: ignore[arg-type]
    assert cause_of(ending) is cause
    may_restart = budget_after([PastInterruption(cause=cause)]).may_restart
    assert must_requeue(cause, ending.job_state, may_restart=may_restart) is requeue


def test_job_is_alive_until_slurm_has_ended_it() -> None:
    alive = {state for state in JobState if state.alive}
    assert alive == {JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED, JobState.ENDING}


@pytest.mark.parametrize(
    ("exit_code", "signal", "out_of_memory", "detail", "cause"),
    [
        (1, None, False, "KeyError: 'label'", Cause.CRASHED),
        (2, None, False, "--data is empty", Cause.BAD_INPUT),
        (3, None, False, "2 GPUs of 4", Cause.BAD_NODE),
        (4, None, False, "", Cause.NO_SPACE),
        (5, None, False, "", Cause.DIVERGED),
        (-11, "SIGSEGV", True, "", Cause.CRASHED),
        (-9, "SIGKILL", False, "", Cause.CRASHED),
        (-9, "SIGKILL", True, "step 7", Cause.OUT_OF_MEMORY),
        (1, None, True, "RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed.", Cause.OUT_OF_MEMORY),
        (1, None, False, "RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed.", Cause.CRASHED),
        (1, None, False, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", Cause.OUT_OF_MEMORY),
        (1, None, False, "MemoryError", Cause.OUT_OF_MEMORY),
        (1, None, False, "OSError: [Errno 12] Cannot allocate memory", Cause.OUT_OF_MEMORY),
        (1, None, False, "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory", Cause.CRASHED),
        (
            1, None, False,
            "RuntimeError: [enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried",
            Cause.OUT_OF_MEMORY,
        ),
        (1, None, False, "OSError: [Errno 28] No space left on device: '/x'", Cause.NO_SPACE),
        (1, None, False, "OSError: [Errno 122] Disk quota exceeded", Cause.NO_SPACE),
        (1, None, False, "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", Cause.BAD_NODE),
        (1, None, False, "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", Cause.BAD_NODE),
        (1, None, False, "torch.AcceleratorError: CUDA error: unspecified launch failure", Cause.BAD_NODE),
        (1, None, False, "torch.AcceleratorError: CUDA error: device-side assert triggered", Cause.CRASHED),
        (
            1, None, False,
            "torch.distributed.DistBackendError: NCCL error in: /x:94, internal error - please report this",
            Cause.BAD_NODE,
        ),
        (1, None, False, "ncclInternalError: connection closed by remote peer gpu02<4242>", Cause.CRASHED),
        (1, None, False, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", Cause.BAD_NODE),
        (1, None, False, "Unable to determine the device handle: GPU is lost.", Cause.BAD_NODE),
        (1, None, False, "ncclInternalError: Internal check failed.", Cause.BAD_NODE),
    ],
)  # fmt: skip
def test_cause_of_a_ranks_exit(
    exit_code: int, signal: str | None, out_of_memory: bool, detail: str, cause: Cause
) -> None:
    assert cause_of_exit(exit_code, signal, out_of_memory, detail, EXIT_CODES) is cause


@pytest.mark.parametrize(
    ("detail", "consequence"),
    [
        ("RuntimeError: [/x/pair.cc:545] Read error [10.77.0.2]:49540: Connection reset by peer.", True),
        ("ncclRemoteError: A call failed possibly due to a network error or a remote process.", True),
        ("RuntimeError: [/x/pair.cc] socketProgress: Connection closed by remote peer gpu02<4242>", True),
        ("what():  [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600 s", True),
        ("what():  [Rank 1] watchdog thread terminated with exception: NCCL error: remote process exited", True),
        ("what():  [Rank 1] Process group watchdog thread terminated with exception: CUDA error: launch failed", False),
        ("NCCL communicator was aborted on rank 1.", True),
        ("RuntimeError: Gloo connectFullMesh failed with [/x/pair.cc:152]", True),
        ("BrokenPipeError: [Errno 32] Broken pipe", True),
        ("ValueError: no luck", False),
    ],
)  # fmt: skip
def test_message_about_the_death_of_another_rank_is_a_consequence(detail: str, consequence: bool) -> None:
    assert is_consequence(detail) is consequence


def test_exit_codes_of_a_user_script_have_no_meaning() -> None:
    assert {cause_of_exit(code, None, False, "", {}) for code in range(1, 256)} == {Cause.CRASHED}
    assert cause_of_exit(2, None, False, "MemoryError", {}) is Cause.OUT_OF_MEMORY
