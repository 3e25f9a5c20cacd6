"""Starts the process wrapper by the path of this directory, which may be in a run's archive of our packages."""

import os
import sys

if __name__ == "__main__":
    # Python has inserted this directory. Instead, look for our packages before PYTHONPATH: a user's code may have
    # packages of the same names.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from jobs.ranks.process_wrapper import main

    main(sys.argv[1:])
