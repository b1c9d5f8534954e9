"""Orders, which are shipped in the background, each exactly once."""
