"""The families that publish, on real ranks: checked over the group, timed beside NCCL and PyTorch's symmetric memory.

One process a rank, a GPU each. :mod:`.start` starts the processes, :mod:`.run` is what each of them does,
:mod:`.report` makes one file of what they found, and :mod:`k3lab.tuning.calibrate_link` fits the predictor's link to it.
"""
