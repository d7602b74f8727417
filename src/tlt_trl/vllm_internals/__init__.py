"""The only place that knows vLLM's private names."""
