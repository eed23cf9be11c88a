"""Backends: one folder for each library that executes collectives, and the interfaces and base classes they share."""
