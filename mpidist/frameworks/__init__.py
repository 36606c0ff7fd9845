"""Adapters for the libraries that models are written in."""
