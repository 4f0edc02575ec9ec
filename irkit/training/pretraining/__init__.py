"""Pre-training of encoders on texts without labels.

In the order in which a reader meets them::

    objectives.py   what an encoder is trained by; base.py: what objectives have in common
    decoder.py      the layer of masked auto-encoding
    batches.py      texts, and which tokens of them are hidden; step.py: a batch in, the loss out
    recipe.py       what is trained on what: one YAML file; running.py: its stages, carried out
"""
