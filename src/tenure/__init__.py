"""Leader election and competing consumers, on the store that you already run."""
