"""The node agent, which runs once per node, stages the data and starts torchrun. Imports no torch."""
