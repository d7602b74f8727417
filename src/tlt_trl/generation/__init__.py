"""Rollouts: the engine that speculates, the loop that steps it, and what TRL calls."""
