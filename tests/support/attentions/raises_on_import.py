"""A file that cannot be imported."""

import torch

TABLE = torch.ones(3) / 0
raise RuntimeError("the table holds infinities")
