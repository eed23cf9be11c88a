"""Gradient sources, the aggregator that runs their buckets through a policy, and the state of a session."""
