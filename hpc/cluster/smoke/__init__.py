"""`hpc smoke`: nodes of the cluster, their devices, disks and network, measured before the first run."""
