"""Ears: what happens, told to logs and metrics. They see events and doors, never rooms."""
