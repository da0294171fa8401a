"""Bytes of safetensors files, without the library that writes them."""

from __future__ import annotations

import json
import struct


def tensors(**sizes):
    """A safetensors file with a float32 vector of each size, whose numbers are its own name's bytes."""
    header, body = {}, b""
    for name, n in sizes.items():
        more = (name[:1] * 4).encode() * n
        header[name] = {"dtype": "F32", "shape": [n], "data_offsets": [len(body), len(body) + len(more)]}
        body += more
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body
