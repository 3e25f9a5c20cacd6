"""`hpc scaling`: the same training on several numbers of nodes, and what each of them gains."""
