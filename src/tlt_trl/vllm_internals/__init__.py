"""
The only place that knows vLLM's private names; of this package it imports `Strategy` alone.

What is read is looked up once, when an engine is taken over; what is written is looked up first, so that a name that
has moved in another version of vLLM is an error that says so and not an attribute that nobody reads.
"""
