"""The errors that reach the user. Runs everywhere."""


class TorchrelayError(Exception):
    """What went wrong, with the value seen and what to type: one line."""

    exit_code = 1


class UserError(TorchrelayError):
    """The user can mend it by typing something else. Nothing was queued and nothing was left behind."""

    exit_code = 2
