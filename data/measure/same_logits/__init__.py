"""Whether a checkout computes the logits that another commit computed, bit for bit.

`python -m data.measure.same_logits compare` replays, in both checkouts on one machine, every
combination of model, settings and toggles that the tests of the first commit try, and compares
every array. See `__main__.py` for the commands and `cases.py` for what a combination is.
"""
