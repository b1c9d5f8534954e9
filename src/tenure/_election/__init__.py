"""Leader election: the machine that decides, the port to the store, the driver, and the objects that users meet."""
