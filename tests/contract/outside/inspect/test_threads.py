"""A model that is called in other threads: the calls of one thread at a time are followed, and no
record has anything of another thread's call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from support.small_models import llama
from torch import Tensor, nn

import mhacli

pytestmark = pytest.mark.real
LLAMA = llama()
FIRST, SECOND = torch.tensor([[0, 45, 17, 99]]), torch.tensor([[0, 8, 9, 8]])
GREEDY = {"do_sample": False, "pad_token_id": 2, "eos_token_id": None}


class WrittenAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)) for part in self.qkv(x).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        weights = torch.softmax(q @ k.mT, dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Written(nn.Module):
    """A model whose attention is known by the functions of torch alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(100, 16)
        self.layers = nn.Sequential(WrittenAttention(), WrittenAttention())

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.layers(self.embedding(input_ids))
        return out


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(ids)
    return out if isinstance(out, Tensor) else out.logits


def generated(ids: Tensor, n: int = 6, **more: Any) -> list[int]:
    text: list[int] = LLAMA.generate(ids, max_new_tokens=n, **GREEDY, **more)[0].tolist()
    return text


def called(call: Callable[[], Any]) -> Future[Any]:
    """The result of a call in a thread that has ended."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call)


@contextmanager
def held(call: Callable[[], Any], *, at: nn.Module) -> Iterator[Future[Any]]:
    """A context while which a call in another thread waits before a module."""
    reached, go = threading.Event(), threading.Event()
    holder: list[int] = []

    def wait(*_: Any) -> None:
        if threading.get_ident() in holder:
            reached.set()
            assert go.wait(60)

    def started() -> Any:
        holder.append(threading.get_ident())
        return call()

    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        stack.callback(at.register_forward_pre_hook(wait).remove)
        stack.callback(go.set)
        future = pool.submit(started)
        assert reached.wait(60)
        yield future


def assert_same(record: Any, right: Any) -> None:
    assert record.sequences == right.sequences
    assert record.self_check.ok
    assert record.arrays.keys() == right.arrays.keys()
    for name, array in right.arrays.items():
        torch.testing.assert_close(
            torch.as_tensor(record.arrays[name]), torch.as_tensor(array), rtol=0.0, atol=0.0
        )


def record_of(model: nn.Module, call: Callable[[], Any]) -> Any:
    with mhacli.inspecting(model, keep=["pattern"]) as seen:
        call()
    return seen.record


def test_what_a_streamer_reads_is_one_record() -> None:
    import transformers

    class Words:
        def decode(self, ids: Any, **_: Any) -> str:
            return " ".join(str(int(each)) for each in ids)

    streamer: Any = transformers.TextIteratorStreamer(Words())  # type: ignore[arg-type]
    with mhacli.inspecting(LLAMA, keep=["pattern"]) as seen:
        thread = threading.Thread(target=lambda: generated(FIRST, streamer=streamer))
        thread.start()
        assert "".join(streamer)
        thread.join()
    assert (len(seen.passes), seen.notes) == (1, ())
    assert_same(seen.record, record_of(LLAMA, lambda: generated(FIRST)))


@pytest.mark.parametrize("model", [LLAMA, Written()], ids=["llama", "written"])
def test_heads_are_removed_in_other_threads_and_shown_as_the_model_used_them(model: Any) -> None:
    with mhacli.removed(model, heads=[(0, 1)]):
        right = record_of(model, lambda: logits(model, FIRST))
        out = logits(model, FIRST)
    removing = mhacli.removed(model, heads=[(0, 1)])
    with removing, mhacli.inspecting(model, keep=["pattern"]) as within:
        future = called(lambda: logits(model, FIRST))
    assert torch.equal(future.result(), out)
    assert_same(within.record, right)
    removing = mhacli.removed(model, heads=[(0, 1)])
    with mhacli.inspecting(model, keep=["pattern"]) as around, removing:
        future = called(lambda: logits(model, FIRST))
    assert torch.equal(future.result(), out)
    assert_same(around.record, right)
    assert not torch.equal(logits(model, FIRST), out)


@pytest.mark.parametrize("model", [LLAMA, Written()], ids=["llama", "written"])
def test_a_call_while_another_thread_is_within_the_model_is_noted(model: Any) -> None:
    at = list(model.modules())[-1]
    with mhacli.inspecting(model, keep=["pattern"]) as seen:
        with held(lambda: logits(model, FIRST), at=at) as first:
            assert torch.equal(
                logits(model, SECOND), called(lambda: logits(model, SECOND)).result()
            )
        called(lambda: logits(model, SECOND))
    assert torch.equal(first.result(), logits(model, FIRST))
    assert len(seen.passes) == 2
    assert_same(seen.passes[0], record_of(model, lambda: logits(model, FIRST)))
    assert_same(seen.passes[1], record_of(model, lambda: logits(model, SECOND)))
    assert [note for note in seen.notes if "another thread" in note] == list(seen.notes)
    assert seen.notes


def test_a_text_that_was_not_seen_from_its_beginning_is_in_no_record() -> None:
    with mhacli.inspecting(LLAMA) as seen, torch.no_grad():
        with held(lambda: LLAMA(FIRST), at=LLAMA.lm_head):
            cache = LLAMA(SECOND, use_cache=True).past_key_values
        LLAMA(FIRST[:, 1:], past_key_values=cache)
    assert [record.sequences[0].tokens for record in seen.passes] == [("0", "45", "17", "99")]


def test_texts_that_threads_write_in_turn_have_a_record_each() -> None:
    import transformers

    turns = [ThreadPoolExecutor(1) for _ in range(2)]
    caches = [transformers.DynamicCache() for _ in turns]
    texts = [torch.cat([ids, FIRST], dim=1) for ids in (FIRST, SECOND)]
    with mhacli.inspecting(LLAMA, keep=["pattern"]) as seen:
        for begin, end in ((0, 4), (4, 5), (5, 8)):
            for turn, cache, text in zip(turns, caches, texts, strict=True):
                turn.submit(LLAMA, text[:, begin:end], past_key_values=cache).result()
    assert seen.notes == ()
    for record, text in zip(seen.passes, texts, strict=True):
        assert [int(token) for token in record.sequences[0].tokens] == text[0].tolist()
        right = record_of(LLAMA, lambda text=text: logits(LLAMA, text))  # type: ignore[misc]
        for layer in (0, 1):
            shown, plain = (r.pattern(layer=layer).values for r in (record, right))
            torch.testing.assert_close(torch.as_tensor(shown), torch.as_tensor(plain))
    for turn in turns:
        turn.shutdown()


def test_threads_that_generate_at_once_do_not_mix() -> None:
    prompts = [torch.tensor([[0, 5 + i, 6, 7 + i]]) for i in range(3)]
    right = [generated(prompt) for prompt in prompts]
    records = [record_of(LLAMA, lambda ids=ids: generated(ids)) for ids in prompts]  # type: ignore[misc]
    barrier = threading.Barrier(3)

    def at_once(ids: Tensor) -> list[int]:
        barrier.wait(60)
        return generated(ids)

    with mhacli.inspecting(LLAMA, keep=["pattern"]) as seen, ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            assert list(pool.map(at_once, prompts)) == right
    assert seen.passes
    whole = {record.sequences: record for record in records}
    for record in seen.passes:
        if record.sequences in whole:
            assert_same(record, whole[record.sequences])
        else:  # another thread was within the model when it went on
            ids = [int(token) for token in record.sequences[0].tokens]
            assert ids in [text[: len(ids)] for text in right]
            assert any("another thread" in note for note in seen.notes)


def test_two_calls_at_once_without_heads_are_refused() -> None:
    with mhacli.removed(LLAMA, heads=[(0, 1)]):
        out = logits(LLAMA, FIRST)
        with (
            held(lambda: logits(LLAMA, FIRST), at=LLAMA.lm_head) as first,
            pytest.raises(mhacli.MhaError, match="another thread"),
        ):
            logits(LLAMA, SECOND)
        assert torch.equal(first.result(), out)


def test_a_call_that_raised_lets_other_threads_in() -> None:
    with mhacli.inspecting(LLAMA) as seen:
        fault = called(lambda: logits(LLAMA, torch.tensor([[999]]))).exception()
        logits(LLAMA, FIRST)
    assert isinstance(fault, IndexError)
    assert len(seen.passes) == 1


def test_a_context_that_ends_while_a_call_runs_says_so() -> None:
    with ExitStack() as stack:
        with mhacli.inspecting(LLAMA) as seen:
            future = stack.enter_context(held(lambda: logits(LLAMA, FIRST), at=LLAMA.lm_head))
        assert seen.passes == ()
        assert len(seen.notes) == 1
    assert torch.equal(future.result(), logits(LLAMA, FIRST))
    removing = mhacli.removed(LLAMA, heads=[(0, 1)])
    with ExitStack() as stack, pytest.raises(mhacli.MhaError, match="thread"), removing:
        stack.enter_context(held(lambda: logits(LLAMA, FIRST), at=LLAMA.lm_head))


@pytest.mark.parametrize("by", [mhacli.inspecting, mhacli.removed])
def test_without_threads_calls_in_others_are_refused(by: Any) -> None:
    more = {} if by is mhacli.inspecting else {"heads": [(0, 1)]}
    with by(LLAMA, threads=False, **more):
        logits(LLAMA, FIRST)
        fault = called(lambda: logits(LLAMA, FIRST)).exception()
    assert isinstance(fault, mhacli.MhaError)
    assert fault.code == "other-thread"


def test_a_thread_in_which_a_context_ended_is_followed_by_the_next() -> None:
    model = Written()
    right = record_of(model, lambda: logits(model, FIRST))
    with ThreadPoolExecutor(1) as pool:
        reached, go = threading.Event(), threading.Event()

        def wait(*_: Any) -> None:
            reached.set()
            assert go.wait(60)

        waiting = model.layers[1].register_forward_pre_hook(wait)
        with mhacli.inspecting(model):
            future = pool.submit(logits, model, FIRST)
            assert reached.wait(60)
        go.set()
        future.result()
        waiting.remove()
        with mhacli.inspecting(model, keep=["pattern"]) as seen:
            pool.submit(logits, model, FIRST).result()
    assert_same(seen.record, right)
