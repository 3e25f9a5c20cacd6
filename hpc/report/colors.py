"""The colors of lines, periods and the frame of the report. Runs on the login node."""

COLORS = {
    "s1": "#1d5fd1", "s2": "#c2500a", "s3": "#14804a", "s4": "#8a3ffc", "s5": "#b8256e", "s6": "#0b7285",
    "s7": "#7a5c00", "s8": "#55606e", "failure": "#c62828", "outside": "#b58100", "queue": "#7048a8",
    "soft": "#55606e", "rule": "#c3cad4", "shade": "#c9d2de",
}  # fmt: skip
"""Colors by the names of their variables in the style sheet."""
_SERIES = 8
_DASHES = ("solid", "dashed", "dotted")


def line_style(number: int) -> tuple[str, str]:
    """Return the color and the dashes of a line by its number: no pair repeats before all are used."""
    return f"s{number % _SERIES + 1}", _DASHES[number // _SERIES % len(_DASHES)]
