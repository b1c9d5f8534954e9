"""Threads, loops, signals, clocks: what the machines run on."""
