"""The ledger of a run: typed events, the files that keep them, and conclusions from them. Runs everywhere."""
