"""The login node's side of Torchrelay: a room or file for each verb, and the libraries `core`, `slurm` and `staging`.

Without torch and pandas, which only `hpc report` imports, a verb answers in a fraction of a second.
"""
