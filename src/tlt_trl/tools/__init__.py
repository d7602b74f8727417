"""Command line tools: warm-up, benchmarks, doctor, simulator."""
