"""Augments images as a function of seed, epoch and sample index. Runs on every rank and in loader workers."""
