"""Runs and their evaluation.

Begin with run.py: a `irkit.Run` holds ranked documents of many queries. measures.py evaluates it, trec.py
adds the measures of trec_eval 10, significance.py tests differences between systems, and fusion.py fuses
several runs.
"""
