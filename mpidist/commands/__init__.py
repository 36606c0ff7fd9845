"""The commands of ``mpidist``: parse, call, print."""
