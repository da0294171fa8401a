"""What several computations share: setup, devices, taps and head statistics."""
