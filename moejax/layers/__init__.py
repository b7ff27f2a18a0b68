"""The parts of a decoder. Weights are flax.nnx modules; mathematics are plain functions on arrays."""
