"""The environment of a rank: process group, device, stop requests, console, random numbers. Runs on every rank."""
