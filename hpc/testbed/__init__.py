"""A real Slurm on one machine: `python -m hpc.testbed up`. Runs as root on that machine; DESIGN, section 8.

`layout` names the shape and every file, `render` writes the configuration (both pure); `system` runs commands,
`namespaces`, `network`, `nodes` and `daemons` each start and end one kind of thing, `accounting` the optional
database; `lifecycle` puts them in order, `__main__` is the command line.
"""
