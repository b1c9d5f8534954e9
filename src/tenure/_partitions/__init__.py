"""Partitions that equal instances own in balance."""
