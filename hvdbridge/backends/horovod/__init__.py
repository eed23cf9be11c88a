"""The backend over Horovod."""
