"""The commands of ``mpidist``, one or two a file."""
