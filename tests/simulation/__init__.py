"""Runs the code that recovers runs in a simulated world, where one seed decides everything that happens.

What decides is the product's: agents, coordinator, claims, endings, supervisor, `hpc cancel`, `hpc resume`. Simulated
are the clock, the network, the storage, Slurm, torchrun and the ranks.
"""
