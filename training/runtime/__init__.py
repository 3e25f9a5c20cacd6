"""The environment of a rank: process group, device, flags to stop, console, random numbers. Runs on every rank."""
