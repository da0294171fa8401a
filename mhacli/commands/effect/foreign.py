"""What a study of effects takes from the inside of torch and transformers, with what it does where
another version lacks it.
"""

import copy
from operator import attrgetter, methodcaller
from typing import Any

from mhacli.models.foreign import attn_implementation
from mhacli.models.layer_names import config_of
from mhacli.usercode.door import call_user


def config_value(model: Any, name: str) -> Any:
    """A value of the config of a model, None if it has none of this name."""
    return getattr(getattr(model, "config", None), name, None)


def is_eager(model: Any) -> bool:
    """Whether a model computes attention without fused kernels; False if nothing says so."""
    return attn_implementation(getattr(model, "config", None)) == "eager"


def has_padding(model: Any) -> bool:
    """Whether a classifier can take several texts in a batch: one of transformers needs the id of a
    padding token for that. True for other models.
    """
    config = config_of(model)
    return config is None or getattr(config.get_text_config(), "pad_token_id", None) is not None


def crop(cache: Any, n_tokens: int) -> None:
    """Cuts `n_tokens` at the end of a cache of keys and values. Raises `UserRaised` where that is
    not possible.

    transformers 5 has `Cache.crop`, for which a negative number counts from the end.
    """
    call_user(methodcaller("crop", -n_tokens), cache)


def copied(cache: Any) -> Any:
    """A copy of a cache, which a pass may extend without changing the original. Raises `UserRaised`
    for a cache that cannot be copied.

    transformers 5 keeps the keys and values of each layer in `Cache.layers`.
    """
    layers = call_user(attrgetter("layers"), cache)
    copy_of_cache = copy.copy(cache)
    copy_of_cache.layers = [copy.copy(layer) for layer in layers]
    return copy_of_cache
