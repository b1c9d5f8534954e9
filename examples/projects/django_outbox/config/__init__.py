"""The settings and the addresses of the project."""
