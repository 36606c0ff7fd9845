"""Schedules and choices in the formats of other tools: one module for each, to read or to write."""
