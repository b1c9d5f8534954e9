"""Schedules: messages that are sent at the times of a cron expression, or at even intervals."""
