"""Leader election: the machine that decides, the door to the store, the room where work runs."""
