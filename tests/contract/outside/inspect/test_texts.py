"""Calls of `mhacli.inspecting` in which a model reads several texts: an attention has the tokens
that it read, or positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.small_models import IMAGE, SIZE, bert_config, eager, filled
from torch import Tensor, nn

import mhacli

pytestmark = pytest.mark.real
ATOL = 2e-5
Batch = dict[str, Tensor]


def batch(*rows: list[int]) -> Batch:
    """Texts padded with 0 to one length, and their mask."""
    ids = nn.utils.rnn.pad_sequence([*map(torch.tensor, rows)], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


QUERIES = batch([2, 20, 21, 3], [2, 22, 3])
DOCUMENTS = batch([2, 30, 31, 3], [2, 32, 3])


class BiEncoder(nn.Module):
    """Reads two texts with one BERT."""

    def __init__(self) -> None:
        import transformers

        super().__init__()
        self.bert = filled(transformers.BertModel(bert_config()))

    def read(self, text: Batch) -> Tensor:
        state: Tensor = self.bert(**text).last_hidden_state[:, 0].mean(dim=0)
        return state

    def forward(self, first: Batch, second: Batch) -> Tensor:
        return self.read(first) * self.read(second)


class OfTensors(BiEncoder):
    def forward(self, ids: Tensor, mask: Tensor, more: Tensor, their_mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(
            {"input_ids": ids, "attention_mask": mask},
            {"input_ids": more, "attention_mask": their_mask},
        )


class LastFirst(BiEncoder):
    def forward(self, first: Batch, second: Batch) -> Tensor:
        return super().forward(second, first)


def seen_tokens(seen: Any, weights: np.ndarray[Any, Any]) -> list[list[str]]:
    """The tokens of every attention in the records that has these weights."""
    found = []
    for record in seen.passes:
        for i, layer in enumerate(record.layers):
            n = layer.positions[0] if layer.positions else len(record.sequences)
            for text in range(n):
                pattern = record.of_layer(i).pattern(batch=text)
                if pattern.values.shape == weights.shape and np.allclose(
                    pattern.values, weights, rtol=0, atol=ATOL
                ):
                    assert pattern.key_tokens == pattern.query_tokens
                    found.append([*pattern.key_tokens])
    return found


@pytest.mark.parametrize("model", [BiEncoder, OfTensors, LastFirst])
@pytest.mark.parametrize(
    "second", [DOCUMENTS, batch([2, 30, 31, 3]), batch([2, 30, 31, 33, 3], [2, 3], [2, 4, 3])]
)
def test_each_text_of_a_bi_encoder_has_its_own_tokens_without_padding(
    model: type[BiEncoder], second: Batch
) -> None:
    pair = model().eval()
    texts = [QUERIES, second]
    call = [*QUERIES.values(), *second.values()] if model is OfTensors else texts
    with mhacli.inspecting(pair, keep=["pattern"]) as seen, torch.no_grad():
        pair(*call)
    for text in texts:
        with torch.no_grad():
            layers = eager(pair.bert)(**text, output_attentions=True).attentions
        for weights in layers:
            for row, ids in enumerate(text["input_ids"].tolist()):
                n = int(text["attention_mask"][row].sum())
                cropped = weights[row, :, :n, :n].numpy()
                assert seen_tokens(seen, cropped) == [[str(token) for token in ids[:n]]]


class SentenceEncoder(nn.Sequential):
    """Reads the output of a tokenizer, as sentence-transformers do."""

    class Words(BiEncoder):
        def forward(self, features: Batch) -> Tensor:  # type: ignore[override]
            state: Tensor = self.bert(**features).last_hidden_state
            return state

    class Pooling(nn.Module):
        def forward(self, state: Tensor) -> Tensor:
            return state.mean(dim=1)

    def __init__(self) -> None:
        super().__init__(self.Words(), self.Pooling())

    def encode(self, features: Batch) -> Any:
        return self.forward(features)


@pytest.mark.parametrize("call", [SentenceEncoder.encode, SentenceEncoder.__call__])
def test_a_sentence_encoder_has_tokens_without_padding(call: Callable[..., Any]) -> None:
    model = SentenceEncoder().eval()
    with mhacli.inspecting(model, keep=["pattern"]) as seen, torch.no_grad():
        call(model, QUERIES)
    tokens = [[*text.tokens] for text in seen.record.sequences]
    assert tokens == [["2", "20", "21", "3"], ["2", "22", "3"]]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (4, 4)) for part in (self.q, self.k, self.v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Encoder(nn.Module):
    """Reads ids under a name of its own, with embeddings of words, positions and types."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.types = (nn.Embedding(n, 16) for n in (50, 20, 2))
        self.layers = nn.ModuleList([Attention(), Attention()])

    def embed(self, x: Tensor, types: Tensor | None = None) -> Tensor:
        where = torch.arange(x.shape[1]).expand(x.shape)
        state = self.words(x) + self.places(where)
        return state if types is None else state + self.types(types)

    def run(self, state: Tensor) -> Tensor:
        for layer in self.layers:
            state = state + layer(state)
        return state

    def forward(self, x: Tensor, types: Tensor | None = None) -> Tensor:
        return self.run(self.embed(x, types))


class Two(nn.Module):
    """Reads two texts with one encoder in some way."""

    def __init__(self, read: Callable[[Encoder, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.read = Encoder(), read

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.read(self.encoder, first, second)


def all_embedded_before(encoder: Encoder, first: Tensor, second: Tensor) -> Tensor:
    x, y = encoder.embed(first), encoder.embed(second)
    return encoder.run(x) + encoder.run(y)


WAYS: dict[str, Callable[[Encoder, Tensor, Tensor], Tensor]] = {
    "called twice": lambda encoder, first, second: encoder(first) + encoder(second),
    "the second first": lambda encoder, first, second: encoder(second) + encoder(first),
    "embedded outside": lambda encoder, first, second: (
        encoder.run(encoder.embed(second)) + encoder.run(encoder.embed(first))
    ),
    "embedded before": all_embedded_before,
}


@pytest.mark.parametrize("way", WAYS)
def test_texts_under_any_name_have_their_tokens_or_positions(way: str) -> None:
    texts = torch.tensor([[[5, 6, 7, 8], [9, 8, 5, 6]], [[15, 16, 17, 18], [3, 4, 5, 6]]])
    model = Two(WAYS[way]).eval()
    with mhacli.inspecting(model, keep=["pattern"]) as seen, torch.no_grad():
        model(*texts)
    for text in texts:
        with mhacli.inspecting(model.encoder, keep=["pattern"]) as alone, torch.no_grad():
            model.encoder(text)
        for layer in range(2):
            for row, ids in enumerate(text.tolist()):
                expected = alone.record.pattern(layer=layer, batch=row)
                tokens = [str(token) for token in ids]
                assert [*expected.key_tokens] == tokens
                (shown,) = seen_tokens(seen, expected.values)
                positions = [f"x{i}" for i in range(4)]
                assert shown == tokens if way == "called twice" else shown in (tokens, positions)
    assert way != "embedded before" or any("several texts" in note for note in seen.notes)


def test_types_and_positions_of_tokens_are_no_texts() -> None:
    torch.manual_seed(0)
    model = Encoder().eval()
    with mhacli.inspecting(model) as seen, torch.no_grad():
        model(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1]]))
    assert seen.record.sequences[0].tokens == ("5", "6", "7", "8")


@pytest.mark.parametrize(("n_images", "n_texts"), [(1, 2), (3, 2)])
def test_clip_shows_every_image_and_text(n_images: int, n_texts: int) -> None:
    import transformers

    ids = {"eos_token_id": 98, "bos_token_id": 97, "pad_token_id": 1}
    config = transformers.CLIPConfig(
        text_config={"vocab_size": 99, "max_position_embeddings": 20, **ids, **SIZE},
        vision_config={**IMAGE, **SIZE},
        projection_dim=16,
    )
    model = filled(transformers.CLIPModel(config))
    torch.manual_seed(0)
    texts = torch.tensor([[97, 5, 6, 98], [97, 7, 8, 98]])[:n_texts]
    call = {"input_ids": texts, "pixel_values": torch.randn(n_images, 3, 16, 16)}
    with mhacli.inspecting(model, keep=["pattern"]) as seen, torch.no_grad():
        model(**call)
        expected = eager(model)(**call, output_attentions=True)
    for kind, tower in (
        ("encoder", expected.vision_model_output),
        ("self", expected.text_model_output),
    ):
        for layer, weights in enumerate(tower.attentions):
            for i, of_one in enumerate(weights):
                actual = seen.record.pattern(layer=layer, kind=kind, batch=i).values
                np.testing.assert_allclose(actual, of_one, rtol=0, atol=ATOL)
        with pytest.raises(mhacli.MhaError, match=f"batch {len(weights)} is out of range"):
            seen.record.pattern(layer=0, kind=kind, batch=len(weights))
