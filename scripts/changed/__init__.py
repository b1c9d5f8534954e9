"""Which tests a change can reach."""
