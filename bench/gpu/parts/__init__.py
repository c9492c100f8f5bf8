"""The parts of the benchmark: one module each, with a `run(rank)` that is called on every rank of it."""
