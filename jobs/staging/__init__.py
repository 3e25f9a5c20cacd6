"""Staging: a verified copy of the data on each node's own disk, read once from shared storage. Runs on compute nodes.

It runs once per node, before torchrun starts and so outside any collective.
"""
