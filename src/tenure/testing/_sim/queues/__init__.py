"""The simulator of queues."""
