"""Kernels of irkit: one folder an operation, each with definition, fast paths, tests and benchmark."""
