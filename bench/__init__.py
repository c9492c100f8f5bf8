"""Benchmarks: `python -m bench` runs all of them; see README.md."""
