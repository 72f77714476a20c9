"""Programs of benchmarks/integrations.py, by library."""
