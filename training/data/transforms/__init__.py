"""Augmentation: a function of seed, epoch and sample index. Runs on every rank and loader worker."""
