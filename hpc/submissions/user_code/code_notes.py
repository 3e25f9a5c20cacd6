"""Tells the user what a run has of the user's directory. Runs on the login node."""

from hpc.base.text import visible
from hpc.submissions.checks import is_node_local
from hpc.submissions.user_code.own_code import UserCode

_LINKS_SHOWN = 3
_OWNERSHIP = "dubious ownership"


def code_line(code: UserCode) -> list[str]:
    """Return a sentence about what a run copies and links; none if it does neither."""
    copies, links = code.layout.copies, code.layout.links
    if code.in_place or not (copies or links):
        return []
    number = f"{len(copies)} file{'' if len(copies) == 1 else 's'}"
    if not links:
        return [visible(f"it has a copy of {number} of {code.root}")]
    shown = ", ".join(links[:_LINKS_SHOWN]) + (f" and {len(links) - _LINKS_SHOWN} more" if links[_LINKS_SHOWN:] else "")
    return [visible(f"it has a copy of {number} of {code.root}, and links to the rest: {shown}")]


def warnings_of_code(code: UserCode, *, on_cluster: bool) -> list[str]:
    """Return warnings about what an edit would change, and about links that the nodes cannot follow."""
    found = [
        f"{code.root / name} has too many entries for a copy of the code in it: an edit there changes the run"
        for name in code.layout.crowded
    ]
    if code.git_problem:
        advice = f"; type git config --global --add safe.directory {code.top}" if _OWNERSHIP in code.git_problem else ""
        found.append(
            f"git does not say which files of {code.top} it tracks ({code.git_problem}), so only small sources and "
            f"configurations are copied, and the rest is linked{advice}"
        )
    if on_cluster and code.layout.links and is_node_local(code.root):
        found.append(f"{code.root} is on this machine's own disk, so the nodes cannot read what is not copied")
    return found
