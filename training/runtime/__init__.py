"""Owns what surrounds a training in its process: process group, device, console, random numbers. Runs on every rank."""
