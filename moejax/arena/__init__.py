"""The arena: one array of pages that expert weights and the KV cache share. See FORMAT.md."""
