"""Training of every kind of model: examples, losses on score matrices, one trainer."""

from __future__ import annotations
