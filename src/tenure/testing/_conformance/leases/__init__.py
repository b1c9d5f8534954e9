"""The suites of leases, by subject."""
