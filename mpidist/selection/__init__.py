"""The selection of the executor and algorithm of a call, with its reasons; no I/O."""
