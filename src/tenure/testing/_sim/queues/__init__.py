"""The rooms of the simulator of queues."""
