"""`hpc scaling`: the same training on several numbers of nodes, and the gain from each."""
