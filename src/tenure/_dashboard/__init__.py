"""The dashboard: the elections, queues and schedules of a store in a browser."""
