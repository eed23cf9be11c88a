"""Tensor operations that policies share. They do no communication, and give the same bits on CPU and CUDA."""
