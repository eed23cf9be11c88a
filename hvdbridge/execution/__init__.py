"""Runs policies: the scheduler on a communicator, the state store, and the simulation of N ranks in one process."""
