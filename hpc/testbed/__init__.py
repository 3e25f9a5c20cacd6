"""A real Slurm on one machine: `python -m hpc.testbed up`. Runs as root on that machine; DESIGN, section 8.

The modules:

    __main__.py   the command line
    lifecycle.py  up, down, status, kill-node, revive-node
    layout.py     the shape of a testbed and the names of its files
    render.py     the text of its configuration files
    daemons.py    munged, slurmctld, slurmdbd
    nodes.py      namespaces, network, power
    system.py     commands, waiting, the lock
"""
