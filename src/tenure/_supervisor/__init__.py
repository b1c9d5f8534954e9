"""The supervisor of ``tenure run``: how many processes of a service run, and when each begins and ends."""
