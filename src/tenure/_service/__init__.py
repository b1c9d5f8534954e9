"""``Service``: the short way to write a worker, over the public interface. Nothing here is impossible without it."""
