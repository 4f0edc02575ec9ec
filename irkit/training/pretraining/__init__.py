"""Pre-training of encoders on texts without labels.

Read in this order::

    objectives.py         what an encoder is trained by
    decoder.py            the decoder of masked auto-encoding
    next_sentence.py      does a document follow a query?
    distillation_objectives.py  learn from another model
    pretrain_step.py      a batch of texts in, the loss out; what objectives share
    corpus.py             texts, shuffled and read again and again
    pretrain_recipe.py    what is trained on what: one YAML file; pretrain_run.py: its stages
"""
