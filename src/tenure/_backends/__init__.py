"""One folder for each technology that leases and queues stand on."""
