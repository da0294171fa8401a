import torch
from torch import nn


def build(factor=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 40))
    with torch.no_grad():
        model[1].weight.mul_(float(factor))
    return model
