"""The examination of a user's attention, `mha check`, and the behaviour of a checkpoint, which `mha
doctor --model` reports.
"""
