# expect: pattern = batch head query key
# target: attend
# lines: qk = scores = q @ k
import math


def attend(q, k, v):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
    return scores.softmax(dim=-1) @ v
