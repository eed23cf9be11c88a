"""The libraries that carry collectives, one folder each, and what they have in common."""
