"""Observers: events written to logs and passed to hooks. They see events and ports, and decide nothing."""
