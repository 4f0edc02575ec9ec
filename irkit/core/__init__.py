"""Ragged rows, representations, and scores between them.

Begin with ragged.py, the only form of token sequences, and representation.py, the three kinds of
representations. scoring.py defines their scores; late_interaction.py has other scores of token vectors.
"""
