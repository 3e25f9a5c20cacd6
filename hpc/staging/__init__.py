"""Staging: a verified copy of the data on each node's own disk, read once from shared storage. Runs on compute nodes.

Staging runs once per node, before torchrun starts and so outside any collective.

    stager.py              one staging: find a copy, or make one
    source.py              the listing of a source, divided into batches; reading them
    copy.py                copying batches from the source and from peers
    peers.py               data from node to node
    coordination.py        which node reads which batches
    archive.py             unpacking
    store.py               the cache on this node's disk, and the manifest of each copy
    copy_progress.py       progress and cancellation
    python_environment.py  the Python environment, which is staged as an archive
"""
