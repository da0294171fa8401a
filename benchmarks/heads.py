"""What the statistics of heads cost, beside fused attention and beside explicit matrices.

    python benchmarks/heads.py [cpu|cuda] [ROUNDS]

With `cpu`, the default:

1. Time: z with the log-sum-exp, the overview of words and of characters, and three statistics alone, each over
   `scaled_dot_product_attention`. Medians of the ratios of each round in an interleaved run, A B C D A B C D …, and of these the
   median of three runs. Explicit matrices with the same statistics over the overview, in one run of three rounds.
2. The whole study of `mha heads`, from the text's ids to the record, of 16,384 words, causal, in turns with fused attention of
   as many tokens.
3. Memory beyond q, k, v and z, at several lengths, each in a fresh process that reports by how much its largest resident size
   grew; and the slope of its logarithm over that of the length.
4. Accuracy against float64 explicit matrices.

12 heads of width 64, float32, batch 1. Words have Zipf's frequencies, characters those of English.

With `cuda`, for heads of width 64 and 128 in bfloat16, 4,096 to 131,072 tokens: the overview over
`scaled_dot_product_attention`, with the statistics by the Triton kernel and by torch, in one interleaved run; the memory that
each takes from CUDA's allocator; accuracy; and the kernel alone in other layouts than its own, at 8,192 tokens.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch.nn.functional import scaled_dot_product_attention

from mhacli.attention import attend, masks
from mhacli.attention.devices import shared_out
from mhacli.attention.tiled.reducer import choice, summarise_by
from mhacli.attention.tiled.reduction import Launch
from mhacli.attention.tiled.scores import Scores
from mhacli.attention.tiled.softmax import SoftmaxPattern, attend_lse, attention_of, pattern_of, tiled_attend
from mhacli.attention.tiled.statistics import ColumnSums, Distance, Entropy, StatisticsRequest
from mhacli.attention.tiled.tiles import reduce_tiles
from mhacli.compute.base.head_statistics import block_of, make_baseline
from mhacli.compute.heads import head_groups, prepare_heads
from mhacli.run import Run
from mhacli.settings import Config, Reducer
from mhacli.text.encode import encode

N_HEADS, D_HEAD = 12, 64
LENGTHS = (2048, 4096, 8192)
RUNS = 3
COMMAND_LENGTH = 16_384
MEMORY_LENGTHS = (4096, 8192, 16384, 32768)
CUDA_LENGTHS = tuple(1 << power for power in range(12, 18))
REDUCERS: tuple[Reducer, ...] = ("triton", "torch")
LAYOUTS = (Launch(64, 64, 8), Launch(64, 64, 4), Launch(32, 64, 4), Launch(32, 32, 4), Launch(64, 128, 8))


def made(
    length: int,
    causal: bool,
    device: str = "cpu",
    spread: float = 1.0,
    d_head: int = D_HEAD,
    dtype: torch.dtype = torch.float32,
) -> tuple[Scores, torch.Tensor]:
    """Scores of deviation `spread`, and values."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, N_HEADS, length, d_head)
    q, k, v = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(3))
    return Scores(q if spread == 1 else q * spread, k, d_head**-0.5, allowed=masks.causal() if causal else None), v


WORDS = 1 / torch.arange(1, 4000.0)
"""Frequencies of which the n-th is 1/n."""
CHARACTERS = torch.tensor(
    [18, 10.3, 7.5, 6.5, 6.2, 5.7, 5.7, 5.3, 5, 4.9, 3.3, 3.2, 2.3, 2.2, 2, 1.9, 1.7, 1.6, 1.5, 1.2, 0.8, 0.6]
)
"""Of the space and the usual letters in English, in percent: of all pairs of characters, 8 % are equal."""


def request_of(length: int, device: str = "cpu", frequencies: torch.Tensor = WORDS) -> StatisticsRequest:
    """The questions of the overview for tokens of these frequencies."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.multinomial(frequencies, length, replacement=True, generator=generator)[None]
    places = torch.arange(length)[None]
    before = torch.where(places > 0, tokens.roll(1, dims=1), -1)
    block = 32 if device == "cpu" else block_of(length)
    return StatisticsRequest(block, tokens, tokens, before, places < 1, places < 4).on(device)


def overview(scores: Scores, v: torch.Tensor, request: StatisticsRequest, reducer: Reducer = "torch") -> None:
    """All that `mha heads` computes of the heads: uniform attention, and the pass over some heads in each thread."""
    make_baseline(scores, request, reducer)

    def passes(heads: range) -> None:
        pattern = attention_of(scores, v, heads).pattern
        summarise_by(reducer, pattern, request)

    n_threads = torch.get_num_threads() if v.device.type == "cpu" else 1
    shared_out([partial(passes, heads) for heads in head_groups(range(N_HEADS), 1, most=-(-N_HEADS // n_threads))])


def three(scores: Scores, v: torch.Tensor) -> None:
    """Entropy, received and distance alone."""
    pattern = SoftmaxPattern(scores, v)
    reduce_tiles(pattern, [Entropy(pattern), ColumnSums(pattern, 32), Distance(pattern)])


def explicit(scores: Scores, v: torch.Tensor, request: StatisticsRequest) -> None:
    """The same statistics of whole matrices, in plain calls: what one would write in a notebook."""
    n = scores.shape[2]
    products = scores.q @ scores.k.mT * scores.scale
    if scores.allowed is not None:
        later = torch.ones(n, n, dtype=torch.bool, device=v.device).triu_(1)
        products = products.masked_fill_(later, -torch.inf)
    pattern = products.softmax(dim=-1)
    products.amax(dim=-1)
    del products
    places = torch.arange(n, device=v.device)
    distance = (places[:, None] - places).abs()
    pattern @ v
    torch.special.entr(pattern).sum(dim=-1)
    pattern.square().sum(dim=-1)
    received = pattern.sum(dim=-2)
    (pattern * distance).sum(dim=-1)
    blocks = pattern.unflatten(-1, (-1, request.block)).sum(dim=-1).unflatten(-2, (-1, request.block)).sum(dim=-2)
    tokens = request.q_tokens[0]
    same = (tokens[:, None] == tokens) & (distance > 0)
    after = tokens[:, None] == request.before_k[0]
    [(pattern * cells).sum(dim=(-1, -2)) for cells in (same, after)]
    flat = (distance + 0 * same).flatten()
    [torch.bincount(flat, weights=head.flatten(), minlength=n) for head in pattern[0]]
    del received, blocks


def seconds(call: Callable[[], object], device: str) -> float:
    """One call, waited for."""
    began = perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - began


def ratios_to_first(calls: Mapping[str, Callable[[], object]], device: str, rounds: int) -> dict[str, float]:
    """The median seconds of the first call, and the medians of the ratios of the others to it, in turns."""
    for call in calls.values():
        call()
    samples = [{name: seconds(call, device) for name, call in calls.items()} for _ in range(rounds)]
    first = next(iter(calls))
    ratios = {name: statistics.median(s[name] / s[first] for s in samples) for name in calls if name != first}
    return ratios | {"seconds": statistics.median(s[first] for s in samples)}


def times(length: int, causal: bool, device: str, rounds: int) -> dict[str, float]:
    """Medians of ratios to fused attention."""
    (scores, v), request = made(length, causal, device), request_of(length, device)
    characters = request_of(length, device, CHARACTERS)
    calls: dict[str, Callable[[], object]] = {
        "fused": lambda: scaled_dot_product_attention(scores.q, scores.k, v, is_causal=causal),
        "z+lse": lambda: attend_lse(scores, v),
        "tiles": lambda: tiled_attend(scores, v),
        "three": lambda: three(scores, v),
        "overview": lambda: overview(scores, v, request),
        "characters": lambda: overview(scores, v, characters),
    }
    return ratios_to_first(calls, device, rounds)


def command_time(length: int, rounds: int) -> dict[str, float]:
    """Medians of the whole study of `mha heads`, from tensors to record, over fused attention."""
    words = " ".join(str(token) for token in request_of(length).q_tokens[0].tolist())
    config = Config(d_model=N_HEADS * D_HEAD, n_heads=N_HEADS, causal=True, device="cpu", max_positions=length)
    encoded = encode([words], config.resolved())
    request = Run(encoded=encoded, config=config.resolved())
    scores, v = made(length, True)

    def study() -> None:
        run = prepare_heads(request)
        run.run()
        run.record()

    fused = partial(scaled_dot_product_attention, scores.q, scores.k, v, is_causal=True)
    return ratios_to_first({"fused": fused, "command": study}, "cpu", rounds)


def faster(length: int, causal: bool, device: str, rounds: int) -> float:
    """The median of how many times as long explicit matrices take as the overview."""
    (scores, v), request = made(length, causal, device), request_of(length, device)
    pairs = [
        (seconds(lambda: explicit(scores, v, request), device), seconds(lambda: overview(scores, v, request), device))
        for _ in range(rounds)
    ]
    return statistics.median(whole / tiled for whole, tiled in pairs)


def extra_bytes(length: int, what: str) -> int:
    """By how much the largest resident size of a fresh process grows while it does `what`."""
    command = [sys.executable, __file__, "--child", str(length), what]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def child(length: int, what: str) -> None:
    """What the fresh process does. z counts as part of q, k and v: nobody attends without it."""
    (scores, v), request = made(length, True), request_of(length)
    z = torch.ones_like(v)
    del z
    before = own_peak(reset=True)
    if what == "overview":
        overview(scores, v, request)
    elif what == "explicit":
        explicit(scores, v, request)
    print(max(0, own_peak() - before))


def own_peak(*, reset: bool = False) -> int:
    """The largest resident size of this process, or, to begin with, since now. Of Linux alone."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def growth(extra: Mapping[int, int], whole: int) -> str:
    """How memory grows with length, and the `whole` of explicit matrices beside it, as far as the system saw any growth: pages
    that a process had freed before are taken again without its largest size moving."""
    (first, small), (last, large) = min(extra.items()), max(extra.items())
    slope, times = "no slope, because memory did not grow", ""
    if small > 0 and large > 0:
        slope = f"slope {math.log(large / small) / math.log(last / first):.2f}"
    if small > 0 and whole > 0:
        times = f", {whole / small:.0f} x as much"
    return f"{slope}; explicit at {first}: {whole / 2**20:.0f} MiB{times}"


def accuracy(
    causal: bool,
    spread: float,
    device: str = "cpu",
    d_head: int = D_HEAD,
    dtype: torch.dtype = torch.float32,
    reducer: Reducer = "torch",
) -> Mapping[str, float]:
    """The largest errors against float64: entropy in nats, received and distance relative."""
    (scores, v), request = made(2048, causal, device, spread, d_head, dtype), request_of(2048, device)
    worst = {"entropy": 0.0, "received": 0.0, "distance": 0.0}
    found = summarise_by(reducer, attention_of(scores, v, range(N_HEADS)).pattern, request)
    places = torch.arange(2048, device=device)
    distance = (places[:, None] - places).abs().double()
    for head in range(N_HEADS):
        kept: dict[str, torch.Tensor] = {}

        def tap(site: str, tensor: torch.Tensor, kept: dict[str, torch.Tensor] = kept, **_: object) -> None:
            kept[site] = tensor

        q, k, values = (t[:, head : head + 1].double() for t in (scores.q, scores.k, v))
        attend(q, k, values, allowed=scores.allowed, scale=scores.scale, tap=tap)
        pattern = kept["pattern"][0, 0]
        far, received = (pattern * distance).sum(-1), pattern.sum(-2)
        worst["entropy"] = max(
            worst["entropy"], (found.entropy[0, head] - torch.special.entr(pattern).sum(-1)).abs().max().item()
        )
        worst["received"] = max(worst["received"], ((found.received[0, head] - received) / received).abs().max().item())
        apart = ((found.distance[0, head] - far) / far).abs()
        worst["distance"] = max(worst["distance"], apart[far > 0].max().item())
    return worst


def shown(errors: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {error:.1e}" for name, error in errors.items())


def on_cpu(rounds: int) -> None:
    """Prints all of it, measured on a CPU."""
    print(f"cpu, {torch.get_num_threads()} threads, torch {torch.__version__}: ratios to scaled_dot_product_attention")
    for length in LENGTHS:
        for causal in (False, True):
            runs = [times(length, causal, "cpu", rounds) for _ in range(RUNS)]
            typical = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            ratios = " ".join(f"{name} {ratio:.2f}" for name, ratio in typical.items() if name != "seconds")
            beside = f", explicit / overview {faster(length, causal, 'cpu', 3):.1f}" if length <= 4096 else ""
            kind = "causal" if causal else "full"
            print(f"T={length} {kind}: fused {1e3 * typical['seconds']:.0f} ms; {ratios}{beside}", flush=True)
    taken = command_time(COMMAND_LENGTH, rounds)
    print(
        f"T={COMMAND_LENGTH} causal: fused {1e3 * taken['seconds']:.0f} ms; whole study {taken['command']:.2f}",
        flush=True,
    )
    extra = {n: extra_bytes(n, "overview") for n in MEMORY_LENGTHS}
    print("memory beyond q, k, v, z, MiB: " + ", ".join(f"T={n} {b / 2**20:.1f}" for n, b in extra.items()))
    print(growth(extra, extra_bytes(4096, "explicit")))
    for causal in (False, True):
        for spread in (1.0, 8.0):
            kind = "causal" if causal else "full"
            print(f"T=2048 {kind}, scores of deviation {spread:g}: {shown(accuracy(causal, spread))}")


def on_cuda(rounds: int) -> None:
    """Prints what the kernel and torch take on a CUDA device. Raises `MhaError` where the kernel cannot run."""
    choice("triton", torch.device("cuda"), torch.bfloat16)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16: ratios to scaled_dot_product_attention"
    )
    for d_head in (64, 128):
        for causal in (False, True):
            kind = f"d_head {d_head} {'causal' if causal else 'full'}"
            for length in CUDA_LENGTHS:
                print(f"{kind} T={length}: {cuda_line(length, causal, d_head, rounds)}", flush=True)
            for reducer in REDUCERS:
                errors = accuracy(causal, 1.0, "cuda", d_head, torch.bfloat16, reducer)
                print(f"{kind} T=2048 by {reducer}: {shown(errors)}", flush=True)
            print(f"{kind} T=8192, the kernel alone: {layouts_line(8192, causal, d_head, rounds)}", flush=True)


def cuda_line(length: int, causal: bool, d_head: int, rounds: int) -> str:
    """Time and memory of the overview by each reducer."""
    (scores, v), request = made(length, causal, "cuda", d_head=d_head, dtype=torch.bfloat16), request_of(length, "cuda")
    calls: dict[str, Callable[[], object]] = {
        "fused": lambda: scaled_dot_product_attention(scores.q, scores.k, v, is_causal=causal),
        **{name: partial(overview, scores, v, request, name) for name in REDUCERS},
    }
    ratios, parts = ratios_to_first(calls, "cuda", rounds), []
    for name in REDUCERS:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        calls[name]()
        parts.append(f"{name} {ratios[name]:.2f}, {(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB")
    return f"fused {1e3 * ratios['seconds']:.2f} ms; " + "; ".join(parts)


def layouts_line(length: int, causal: bool, d_head: int, rounds: int) -> str:
    """The kernel alone in each layout, relative to fused attention."""
    from mhacli.attention.tiled.kernel_statistics import kernel_statistics

    (scores, v), request = made(length, causal, "cuda", d_head=d_head, dtype=torch.bfloat16), request_of(length, "cuda")
    pattern = pattern_of(scores, attend_lse(scores, v).lse)
    calls: dict[str, Callable[[], object]] = {
        "fused": lambda: scaled_dot_product_attention(scores.q, scores.k, v, is_causal=causal),
        **{"×".join(map(str, own)): partial(kernel_statistics, pattern, request, launch=own) for own in LAYOUTS},
    }
    ratios = ratios_to_first(calls, "cuda", rounds)
    return ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items() if name != "seconds")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("rounds", nargs="?", type=int, default=5, help="rounds of each measurement (default: 5)")
    given = parser.parse_args()
    on_cuda(given.rounds) if given.device == "cuda" else on_cpu(given.rounds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(int(sys.argv[2]), sys.argv[3])
    else:
        main()
