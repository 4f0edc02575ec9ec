"""Helpers for all other packages of irkit: atomic files, locks, weight files, progress, signals, plugins."""
