"""The parts of a decoder. Weights are flax.nnx modules, mathematics plain functions."""
