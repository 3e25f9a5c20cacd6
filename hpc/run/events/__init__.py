"""The ledger of a run: its events, the files that keep them, and conclusions from them. Runs everywhere."""
