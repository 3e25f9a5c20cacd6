"""The errors that reach the user. Runs everywhere."""

from hpc.core.causes import EXIT_BAD_NODE


class TorchrelayError(Exception):
    """The work failed. The message is one line: what happened, the value seen, what to type."""

    exit_code = 1


class BadNodeError(TorchrelayError):
    """This node cannot train; another one might."""

    exit_code = EXIT_BAD_NODE


class UserError(TorchrelayError):
    """The user's mistake. Nothing was queued and nothing was left behind."""

    exit_code = 2
