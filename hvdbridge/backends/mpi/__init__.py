"""The backend over mpi4py."""
