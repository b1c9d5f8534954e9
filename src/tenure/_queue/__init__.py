"""Competing consumers: the machine that keeps the locks, the door to a broker, the rooms where messages come and go."""
