"""Weights as nested codes with lookup tables, and what they are measured against."""
