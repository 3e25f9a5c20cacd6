"""The exception that ended a program is found in what the program printed."""

import traceback
from collections.abc import Callable

import pytest

from hpc.base.traceback_text import describe_exception, exception_lines
from hpc.run.causes import cause_of_exit


def noted() -> None:
    error = ValueError("no luck")
    error.add_note("in sample 7")
    raise error


class LocalError(Exception):
    """An exception whose name Python prints with its module."""


def local() -> None:
    raise LocalError("no luck")


def cuda() -> None:
    advice = "\nSearch for `cudaErrorECCUncorrectable' for more.\nFor debugging consider CUDA_LAUNCH_BLOCKING=1"
    raise RuntimeError(f"CUDA error: uncorrectable ECC error encountered{advice}")


def group() -> None:
    found = list[Exception]()
    for one in (local, cuda):
        try:
            one()
        except Exception as error:  # noqa: BLE001
            found.append(error)
    raise ExceptionGroup("two failed", found)


def quoted() -> None:
    try:
        cuda()
    except RuntimeError:
        text = traceback.format_exc().replace("\n", "\n    ")
        raise RuntimeError(f"worker 3 says:\n    {text}") from None


CASES: list[tuple[Callable[[], None], str, str]] = [
    (noted, "ValueError: no luck", "crashed"),
    (local, f"{__name__}.LocalError: no luck", "crashed"),
    (cuda, "RuntimeError: CUDA error: uncorrectable ECC error encountered", "bad_node"),
    (group, f"ExceptionGroup: two failed (2 sub-exceptions) (with {__name__}.LocalError: no luck)", "crashed"),
    (
        quoted,
        "RuntimeError: worker 3 says: (with RuntimeError: CUDA error: uncorrectable ECC error encountered)",
        "bad_node",
    ),
]


def printed(function: Callable[[], None], prefix: str = "") -> list[str]:
    try:
        function()
    except BaseException:  # noqa: BLE001
        lines = traceback.format_exc().split("\n")
    # torch's hook adds the rank in the same way.
    return [f"{prefix}{line}" if line else "" for line in lines]


@pytest.mark.parametrize("prefix", ["", "[rank1]: ", "[rank11]: [rank0]: "])
@pytest.mark.parametrize(("function", "message", "cause"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_message_and_cause(function: Callable[[], None], message: str, cause: str, prefix: str) -> None:
    lines = ["epoch 1", *printed(local), *["epoch 2"] * 5, *printed(function, prefix), "a destructor complains"]
    assert describe_exception(lines) == message
    assert cause_of_exit(1, None, False, describe_exception(lines), {}) == cause
    shown = exception_lines(lines)
    assert shown[0].endswith("Traceback (most recent call last):")
    assert function.__name__ in "".join(shown)
    if prefix:
        expected = "\n".join(printed(function)).rstrip().split("\n")
        assert shown == expected, "torch marks the end of the message, too"


RICH = """\
╭───────────────────── Traceback (most recent call last) ──────────────────────╮
│ /home/u/train.py:7 in <module>                                               │
│ ❱ 7 step(batch)                                                              │
╰──────────────────────────────────────────────────────────────────────────────╯
ValueError: no luck"""
FRAMES = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f()\n'
RAISED = f"{FRAMES}ValueError: no luck"
LATER = "".join(f"wandb: {number}\n" for number in range(30))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch 1\nepoch 2", ""),
        (RICH, "ValueError: no luck"),
        (f"{RAISED}\nException ignored in: <function f at 0x7f>\n{FRAMES}OSError: gone", "ValueError: no luck"),
        (f"{RAISED}\nError in atexit._run_exitfuncs:\n{FRAMES}OSError: gone", "ValueError: no luck"),
        (f"Exception in thread Thread-1 (run):\n{FRAMES}OSError: gone", "OSError: gone"),
        (f"{RAISED}\n{FRAMES}", "ValueError: no luck"),
        (f"{FRAMES}ValueError: caught\n{LATER}", ""),
        ("\n".join(f"[rank1]: {line}" for line in RAISED.split("\n")) + f"\n{LATER}", "ValueError: no luck"),
        (f"{FRAMES}ValueError: a\n{FRAMES}OSError: b", "OSError: b"),
        (f"{FRAMES}ValueError: {'x' * 999}", f"ValueError: {'x' * 488}"),
    ],
)
def test_other_texts(text: str, message: str) -> None:
    assert describe_exception(text.splitlines()) == message
