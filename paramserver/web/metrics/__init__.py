"""Metrics: of the job at the coordinator, of the process itself at servers and workers, for Prometheus and OTLP."""
