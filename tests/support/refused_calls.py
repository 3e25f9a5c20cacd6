"""Runs a command to which the kernel refuses system calls, as it does on file systems that lack what they ask for.

    python tests/support/refused_calls.py link=EPERM linkat=EPERM -- COMMAND...

vfat has no hard links, Lustre without `-o flock` no locks; but not every kernel that runs the tests can mount those. A
filter (seccomp) for this process and its children gives the same errors, whatever the file system.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

_NUMBERS = {
    "x86_64": {"link": 86, "linkat": 265, "flock": 73},
    "aarch64": {"linkat": 37, "flock": 32},  # there is no link
}[platform.machine()]
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
# linux/filter.h and linux/seccomp.h: code, jump if true, jump if false, operand.
_LOAD_NUMBER, _ALLOW = (0x20, 0, 0, 0), (0x06, 0, 0, 0x7FFF0000)
_EQUAL, _RETURN, _ERRNO = 0x15, 0x06, 0x00050000


def refuse(errors: dict[str, int]) -> None:
    """From now on these calls fail."""
    program = [_LOAD_NUMBER]
    for call, number in errors.items():
        if call in _NUMBERS:
            program += [(_EQUAL, 0, 1, _NUMBERS[call]), (_RETURN, 0, 0, _ERRNO | number)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in [*program, _ALLOW]))
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("HP", len(program) + 1, ctypes.addressof(code)))
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), f"prctl{arguments}")


if __name__ == "__main__":
    split = sys.argv.index("--")
    refuse({call: getattr(errno, name) for call, name in (word.split("=") for word in sys.argv[1:split])})
    os.execv(sys.argv[split + 1], sys.argv[split + 1 :])
