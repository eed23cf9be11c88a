"""One step of aggregation: gradients are collected into buckets, reduced by the policy, and delivered."""
