"""Kernels for NVIDIA GPUs, each with a reference in plain jax.numpy that runs anywhere."""
