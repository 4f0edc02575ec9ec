"""Pre-training of encoders on texts without labels.

Read in this order::

    objectives.py         what an encoder is trained by; objective.py: what objectives share
    decoder.py            the decoder of masked auto-encoding
    distillation_objectives.py  learn from another model
    text_batches.py       texts, and which of their tokens are hidden; pretrain_step.py: a batch in, the loss
    out corpus.py             texts, shuffled and read again and again
    pretrain_recipe.py    what is trained on what: one YAML file; pretrain_run.py: its stages
"""
