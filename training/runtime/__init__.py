"""What a rank runs in: process group, signals, heartbeat, console. Runs on every rank."""
