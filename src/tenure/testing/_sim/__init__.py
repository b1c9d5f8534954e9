"""The rooms of the simulator of elections, and what both simulators share."""
