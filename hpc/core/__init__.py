"""The base of all three packages: run directories, files, the ledger, units, errors. Runs anywhere."""
