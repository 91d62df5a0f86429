"""Whether a checkout computes the logits that another commit computed, bit for bit.

`python -m data.measure.same_logits compare` replays every combination of model, settings and
toggles that the tests of the first commit try. It does so in both checkouts on one machine, and
compares every array. See `__main__.py` for the commands and `cases.py` for what a combination is.
"""
