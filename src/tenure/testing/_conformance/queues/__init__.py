"""The suites of queues, by subject."""
