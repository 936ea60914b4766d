"""Benchmarks: each prints one JSON object with `python -m benchmarks.NAME --json`."""
