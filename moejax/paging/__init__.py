"""Which linear gets which width, for how many bytes."""
