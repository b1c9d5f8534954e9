"""The simulator of elections."""
