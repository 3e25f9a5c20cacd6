"""torchrun with marks (marks.py): a script in place of torch's, or of ours if the path of that comes first."""

import gc
import os
import runpy
import sys

if __name__ == "__main__":
    # As ours does, so that the imports below cost it the same.
    is_ours = sys.argv[1].endswith("torchrun_main.py")
    if is_ours:
        gc.disable()

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.run import main

from benchmarks.restart.marks import mark, mark_after


def add_marks() -> None:
    """Mark what this node's agent does between the death of a rank and the start of new ones."""
    who = f"torchrun-{os.environ.get('NODE', '0')}"
    mark("torchrun imported", who)
    mark_after(LocalElasticAgent, "_stop_workers", "ranks ended", who, before="noticed")
    mark_after(LocalElasticAgent, "_rendezvous", "met", who)
    mark_after(LocalElasticAgent, "_start_workers", "forked", who)


if __name__ == "__main__":
    add_marks()
    if is_ours:
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        main()
