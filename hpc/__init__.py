"""The login node's side of Torchrelay: submit, watch, cancel.

One file per verb; `spec` holds every flag, `rundir` every file name, `slurm` every Slurm command.
Nothing here imports torch, torchvision or pandas at import time: a verb answers in a fraction of a second.
"""
