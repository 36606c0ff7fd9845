"""Serves calls: bound to memory, numbered, and run within their deadline."""
