"""The kernels of irkit: one folder per operation, with its definition, fast code, tests and benchmark."""
