"""Execution of policies: the scheduler, the state store, and the simulation of N ranks in one process."""
