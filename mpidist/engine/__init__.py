"""Serving calls: bind them to memory, number them, run them within their deadline."""
