"""The rooms of the suites."""
