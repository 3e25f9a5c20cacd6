"""`hpc smoke`: measure nodes of the cluster, their devices, disks and network, before the first run."""
