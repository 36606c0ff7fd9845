"""Which executor and algorithm serves a call, and why; no I/O."""
