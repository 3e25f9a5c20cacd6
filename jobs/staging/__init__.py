"""Staging: a verified copy of the data on each node's own disk, read once from shared storage. Runs on compute nodes.

It runs once per node, before torchrun starts and so outside any collective.

    node_staging.py        staging and packing together with the other nodes
    stager.py              one staging: find a copy, or make one
    source.py              listing a source, dividing it into batches, and reading them
    copy.py                copying batches from the source and from peers
    peers.py               transfers between nodes
    coordination.py        the plan: which node reads which batches
    unpack_archive.py      unpacking
    store.py               the cache on this node's disk, and the manifest of each copy
    copy_progress.py       progress and cancellation
    unpack_environment.py  the copy of a Python environment on this node
"""
