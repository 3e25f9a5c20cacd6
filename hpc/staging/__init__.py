"""Staging: the data on every node's own disk, once, verified, at the speed of the hardware. Runs on compute nodes.

Once per node, before torchrun starts and so outside any collective.

    source.py   what is to be copied: the list of files, cut into batches
    store.py    the copies on this node: names, locks, eviction
    manifest.py what a copy must be
    space.py    room for them
    copy.py     the copying, from shared storage and from other nodes
    pieces.py   reading and writing parts of files
    peers.py    data from node to node
    team.py     what the nodes tell each other
    agree.py    one list of files for all nodes
    patience.py waiting, while everything else is looked after
    archive.py  unpacking
    members.py  what stands in archives
    stage.py    all of it together
    staged.py   what it came to
"""

from hpc.staging.source import StagingStopped
from hpc.staging.staged import NoRoomError, Staged
from hpc.staging.stager import stage
from hpc.staging.team import SingleNode

__all__ = ["NoRoomError", "SingleNode", "Staged", "StagingStopped", "stage"]
