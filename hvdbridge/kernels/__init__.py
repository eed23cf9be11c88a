"""Tensor operations that policies share: no communication, no policy, the same numbers on CPU and CUDA."""
