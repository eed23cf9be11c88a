"""Start of a job: detection of launcher, rank and size, the first exchange between ranks, and local launching."""
