# expect: attend is right, attend_without_scale is wrong


def attend(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def attend_without_scale(q, k, v):
    return (q @ k.mT).softmax(-1) @ v
