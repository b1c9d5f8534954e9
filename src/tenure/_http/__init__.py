"""The endpoints for probes, Prometheus and KEDA, as an ASGI application."""
