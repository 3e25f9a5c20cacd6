"""Uses trained models outside their training: for `hpc predict`, `hpc export` and `hpc evaluate`."""
