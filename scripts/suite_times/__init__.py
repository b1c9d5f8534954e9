"""What the tests cost: wall time, CPU time, and the seconds in which they wait."""
