"""torchrun, which starts and ends sooner: a script in place of `python -m torch.distributed.run`. Runs once per node.

Of the second and a half that its imports take, a quarter of a second goes into looking for garbage where there is none.
At the end Python would take torch apart for half a second, of the grace period if there is one.
"""

import gc

if __name__ == "__main__":
    gc.disable()

import atexit
import os
import sys
import traceback

from torch.distributed.run import main


def run() -> int:
    """Be torchrun, and return what it would have exited with."""
    gc.freeze()
    gc.enable()
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # the interpreter would print it, too
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = run()
    # What was to be tidied up, such as temporary directories.
    atexit._run_exitfuncs()  # noqa: SLF001  # the only way to have them run
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
