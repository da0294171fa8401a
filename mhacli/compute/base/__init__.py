"""Parts that several computations use: setup, devices, taps and head statistics."""
