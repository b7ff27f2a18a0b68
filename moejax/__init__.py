"""moejax: Mixture-of-Experts inference in JAX, with expert weights managed while requests run."""

__version__ = "0.1.0"
