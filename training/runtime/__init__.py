"""What a rank runs in: process group, signals, heartbeat, console, random numbers. Runs on every rank."""
