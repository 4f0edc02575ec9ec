"""Adapters: irkit behind the interfaces of other libraries, one module per library.

Each module imports its library, so import it by its name, such as `irkit.adapters.langchain`. Classes have
the methods and options that the library expects, and do nothing but convert arguments and results. shared.py
has what several adapters need.
"""
