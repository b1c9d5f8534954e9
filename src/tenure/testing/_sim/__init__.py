"""The simulators of elections and of queues, and what they share."""
