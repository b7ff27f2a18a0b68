"""The decoder, made of parts, and the programs that run it."""
