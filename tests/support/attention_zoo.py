"""What is in `attentions/`: somebody's layers, right and wrong, and what is to be said of each.

`test_attention_zoo.py` proves the tables without mhacli: a right layer equals the formula; a wrong one does not, and does once
its one mistake is mended in its source.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "attentions"

CODES = (
    "split-without-transpose",
    "merge-without-transpose",
    "softmax-axis",
    "scale-missing",
    "scale-d-model",
    "scale-not-root",
    "scale-twice",
    "qk-swapped",
    "causal-missing",
    "causal-off-by-one",
    "causal-transposed",
    "causal-top-left",
    "mask-inverted",
    "mask-multiplied",
    "mask-added-as-01",
    "mask-after-softmax",
    "mask-sentinel-too-small",
    "mask-not-finite",
    "fully-masked-row",
    "padding-ignored",
    "padding-inverted",
    "gqa-tiled",
    "heads-averaged",
    "heads-summed",
    "head-width",
    "out-proj-missing",
    "out-proj-transposed",
    "bias-missing",
    "qkv-order",
    "rope-pairing",
    "dropout-in-eval",
    "dropout-not-rescaled",
    "value-not-split",
    "state-kept-between-calls",
)
"""The codes of the mistakes that must be told; those of cases marked `extra` are beyond them."""

CHOICES = {
    "no-bias": "no projection has a bias",
    "some-biases": "only some projections have a bias",
    "no-output-projection": "the heads side by side are the output",
    "value-width": "d_v is not d_head",
    "head-width": "heads × d_head is not d_model, and a parameter of the constructor says so",
    "grouped-queries": "fewer heads of keys and values than of queries",
    "fused-per-head": "a fused projection lies head by head",
    "strided-heads": "head h has every n-th column",
    "weights-in-out": "weights are [in, out]",
    "other-scale": "a scale that an argument or the documentation names",
    "softcap": "scores are capped softly",
    "causal": "causal by itself",
    "mask-keeps": "True or 1 in a mask means: may attend",
    "mask-hides": "True or 1 in a mask means: hidden",
    "mask-added": "a mask is added to the scores",
    "empty-row-mean": "a row that may see nothing gives the mean of v",
    "empty-row-nan": "a row that may see nothing gives NaN",
    "rope-half": "rotary positions, columns j and j + d/2",
    "rope-interleaved": "rotary positions, columns 2j and 2j + 1",
    "dropout": "dropout in training",
    "batch-second": "the length is the first axis",
    "returns-pattern": "the pattern is returned too",
    "float32-softmax": "the softmax is done in float32",
}
"""Names in the tables, for choices that a report should tell. They are this table's names; a report may have others."""


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def places_in(path: Path) -> dict[str, tuple[int, int]]:
    """The first and the last line of each class and function of a file."""
    body = ast.parse(text_of(path)).body
    return {n.name: (n.lineno, n.end_lineno or 0) for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef)}


@dataclass(frozen=True)
class Case:
    """One layer or function, and how the proof asks it.

    `arguments` are those that `--arg` gives, `options` further words of the command line, and `causal` that `--causal` is given.

    The rest is for the proof. `call` is Python that asks `it`: about `x` `[3, 5, width]`, or `q` (as long) with `k` and `v`
    `[3, 7, width]`, which are split into heads where it is a function; masks are `keep` (bool `[3, 1, query, key]`), `real` (bool
    `[3, key]`, True = token) and `lengths`. `sees` tells what the right answer sees: words of `causal mask padding left-padding`,
    and of `same-rows` (values are made from `k` too) and `last-two` (only these queries are asked). `weights` tells where its
    weights are: the names of four layers (q k v o), or `KIND:NAMES`. `scale` of 0 is 1/√d_head, `kv_heads` of 0 as many as
    `heads`.
    """

    file: str
    name: str
    arguments: str = "d_model=24 n_heads=3"
    call: str = "it(x)"
    sees: str = ""
    weights: str = "q_proj k_proj v_proj out_proj"
    causal: bool = False
    options: str = ""
    heads: int = 3
    kv_heads: int = 0
    scale: float = 0.0
    rope: str = ""
    softcap: float = 0.0
    note: str = ""

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.file}.py"

    @property
    def target(self) -> str:
        return f"{self.path}:{self.name}" if self.file else self.name

    @property
    def command(self) -> list[str]:
        """What follows `mha check`."""
        given = [word for pair in self.arguments.split() for word in ("--arg", pair)]
        return [self.target, *given, *(["--causal"] if self.causal else []), *self.options.split()]

    @property
    def is_function(self) -> bool:
        return self.weights == "none"

    @property
    def lines(self) -> tuple[int, int]:
        """The first and the last line of its source."""
        return places_in(self.path)[self.name]

    @property
    def source(self) -> str:
        first, last = self.lines
        return "".join(text_of(self.path).splitlines(keepends=True)[first - 1 : last])


@dataclass(frozen=True)
class Wrong(Case):
    """`code` is what must be found, first; `also` are codes that say as much, and may be found instead or besides.

    `why` says the mistake, and where its author's intention can be read if not in the formula. `mended` are pairs of what its
    source says and what it should say, the first of which stands at `line`; `elsewhere` names the class where the mistake stands
    if it is another. `when` it shows: eval; large, with scores a thousand times as large; second, in a second call; training, in
    the mean over many calls. `extra` codes are none of CODES; `hard` cases are beyond what the code asks for in so many words.
    """

    code: str = ""
    why: str = ""
    mended: tuple[tuple[str, str], ...] = ()
    when: str = "eval"
    also: tuple[str, ...] = ()
    extra: bool = False
    hard: bool = False
    elsewhere: str = ""

    @property
    def culprit(self) -> Case:
        """The class or function in whose source the mistake stands."""
        return Case(self.file, self.elsewhere or self.name)

    @property
    def mended_source(self) -> str:
        """The source of the culprit as it should be."""
        source = self.culprit.source
        for old, new in self.mended:
            if old not in source:
                raise LookupError(old)
            source = source.replace(old, new)
        return source

    @property
    def mended_text(self) -> str:
        """The text of its file with its mistake mended: one more right layer."""
        return text_of(self.path).replace(self.culprit.source, self.mended_source)

    @property
    def line(self) -> int:
        """Where the mistake stands."""
        source, old = self.culprit.source, self.mended[0][0]
        blank = old[: len(old) - len(old.lstrip())]
        return self.culprit.lines[0] + source[: source.index(old)].count("\n") + blank.count("\n")


@dataclass(frozen=True)
class Right(Case):
    """`choices` are names of CHOICES that should be told, among others perhaps."""

    choices: tuple[str, ...] = ()
    atol: float = 1e-11


@dataclass(frozen=True)
class Unusual(Case):
    """Right in its own way, or not to be judged: what may be said of it. `code`, where it may be called wrong, is the code."""

    verdict: tuple[str, ...] = ("right", "unknown")
    code: str = ""


@dataclass(frozen=True)
class Trouble(Case):
    """`verdict` is right, wrong or unknown; several where it is a matter of how patient one is. `says` are words that the answer
    must hold."""

    verdict: tuple[str, ...] = ("unknown",)
    says: tuple[str, ...] = ()


S, W, T = "wrong_separate", "wrong_fused", "wrong_taken"
FUSED, FUSED_D = "fused:qkv proj", "fused:to_qkv to_out"
DIM = "dim=24 heads=3"
DIMN = "dim=24 num_heads=3"
MASKED = {"call": "it(x, mask=keep)", "sees": "mask"}
CROSS = {"call": "it(q, k, v)"}
CROSSED = {"call": "it(q, k, v, mask=keep)", "sees": "mask"}

WRONG = (
    # split-without-transpose
    Wrong(
        S,
        "SentenceAttention",
        weights="q_linear k_linear v_linear out",
        **MASKED,
        code="split-without-transpose",
        why="view(b, heads, t, d_head) instead of view(b, t, heads, d_head).transpose(1, 2); the merge does transpose",
        mended=((".view(b, self.n_heads, t, self.d_head)", ".view(b, t, self.n_heads, self.d_head).transpose(1, 2)"),),
    ),
    Wrong(
        W,
        "TokenAttention",
        DIM,
        weights=FUSED,
        code="split-without-transpose",
        why="the same after a fused projection",
        mended=(
            (".reshape(b, self.heads, n, self.head_dim)", ".reshape(b, n, self.heads, self.head_dim).transpose(1, 2)"),
        ),
    ),
    Wrong(
        W,
        "TileAttention",
        DIMN,
        weights=FUSED,
        code="split-without-transpose",
        why="the whole fused projection is read as (3, heads, tokens, width): tokens mix, and so do q, k and v",
        mended=(
            (
                "reshape(B, 3, self.num_heads, N, C // self.num_heads)",
                "reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(0, 2, 3, 1, 4)",
            ),
        ),
        hard=True,
    ),
    Wrong(
        S,
        "ReviewAttention",
        "hidden_dim=24 num_heads=3",
        call="it(x)",
        weights="query key value dense",
        code="split-without-transpose",
        why="split and merge both forget the transposition: two mistakes that belong together",
        mended=(
            (
                "t.reshape(batch, self.num_heads, length, self.head_dim)",
                "t.reshape(batch, length, self.num_heads, self.head_dim).transpose(1, 2)",
            ),
            ("context.reshape(batch", "context.transpose(1, 2).reshape(batch"),
        ),
        also=("merge-without-transpose",),
    ),
    # merge-without-transpose
    Wrong(
        S,
        "PaperAttention",
        "d_model=24 num_heads=3",
        **CROSSED,
        weights="W_q W_k W_v W_o",
        code="merge-without-transpose",
        why="combine_heads views [batch, head, time, d] as [batch, time, d_model]",
        mended=(("x.contiguous().view(", "x.transpose(1, 2).contiguous().view("),),
    ),
    Wrong(
        W,
        "PatchAttention",
        DIMN,
        weights=FUSED,
        code="merge-without-transpose",
        why="the same after a fused projection",
        mended=(("(weights @ v).reshape(", "(weights @ v).transpose(1, 2).reshape("),),
    ),
    Wrong(
        "classics",
        "MultiheadAttention",
        "input_dim=24 embed_dim=24 num_heads=3",
        call="it(x, mask=keep)",
        sees="mask",
        weights="per-head:qkv_proj o_proj",
        code="merge-without-transpose",
        why="fused per head; the heads are read as rows without moving the axis back",
        mended=(("values.reshape(batch_size", "values.permute(0, 2, 1, 3).reshape(batch_size"),),
    ),
    # softmax-axis
    Wrong(
        S,
        "TranslationAttention",
        "d_model=24 heads=3",
        **CROSSED,
        weights="q_proj k_proj v_proj o_proj",
        code="softmax-axis",
        why="over queries, dim=-2",
        mended=(("dim=-2", "dim=-1"),),
    ),
    Wrong(
        S,
        "WeatherAttention",
        "size=24 num_heads=3",
        weights="to_query to_key to_value to_out",
        code="softmax-axis",
        why="over heads, nn.Softmax(dim=1)",
        mended=(("nn.Softmax(dim=1)", "nn.Softmax(dim=-1)"),),
    ),
    Wrong(
        S,
        "HeadsInALoop",
        "width=24 n_heads=3",
        weights="loop:heads.{i}.q heads.{i}.k heads.{i}.v linear",
        code="softmax-axis",
        why="over the batch, dim=0 of three axes, in a class for one head",
        mended=(("dim=0", "dim=-1"),),
        elsewhere="Head",
    ),
    Wrong(
        W,
        "PixelAttention",
        DIMN,
        weights=FUSED,
        code="softmax-axis",
        why="over queries, nn.Softmax(dim=2) from a three-dimensional version",
        mended=(("nn.Softmax(dim=2)", "nn.Softmax(dim=-1)"),),
    ),
    Wrong(
        W,
        "FrameAttention",
        DIMN,
        weights=FUSED,
        code="softmax-axis",
        why="no dim is given, and torch chooses 1 for four axes: over heads, with a warning",
        mended=(("nn.Softmax()", "nn.Softmax(dim=-1)"),),
    ),
    Wrong(
        W,
        "ShotAttention",
        DIMN,
        weights=FUSED,
        code="softmax-axis",
        why="over the batch, dim=0",
        mended=(("F.softmax(scores, 0)", "F.softmax(scores, -1)"),),
    ),
    Wrong(
        "classics",
        "SelfAttention",
        "embed_size=24 heads=3",
        call="it(v, k, q, keep)",
        sees="mask",
        weights="queries keys values fc_out",
        code="softmax-axis",
        why="over queries, dim=2, with arguments in the order values, keys, query",
        mended=(("dim=2", "dim=3"),),
    ),
    # scale
    Wrong(
        S,
        "ParagraphAttention",
        **CROSSED,
        weights="wq wk wv wo",
        code="scale-missing",
        why="q·k as it is",
        mended=(('"bhqd,bhkd->bhqk", q, k)', '"bhqd,bhkd->bhqk", q, k) / math.sqrt(q.size(-1))'),),
    ),
    Wrong(
        W,
        "LeafAttention",
        DIM,
        weights=FUSED_D,
        code="scale-missing",
        why="q·k as it is",
        mended=(('"bhid,bhjd->bhij", q, k)', '"bhid,bhjd->bhij", q, k) / math.sqrt(q.size(-1))'),),
    ),
    Wrong(
        W,
        "BranchAttention",
        DIM,
        weights=FUSED_D,
        code="scale-missing",
        why="scale=1.0 given to torch's kernel, which nothing explains",
        hard=True,
        mended=((", scale=1.0", ""),),
    ),
    Wrong(
        S,
        "ChapterAttention",
        call="it(v, k, q, keep)[0]",
        sees="mask",
        weights="wq wk wv dense",
        code="scale-d-model",
        why="divided by √d_model",
        mended=(("math.sqrt(self.d_model)", "math.sqrt(self.depth)"),),
    ),
    Wrong(
        W,
        "VisionAttention",
        DIM,
        weights="fused:to_qkv to_out.0",
        code="scale-d-model",
        why="self.scale = dim ** -0.5",
        mended=(("dim**-0.5", "(dim // heads) ** -0.5"),),
    ),
    Wrong(
        S,
        "MelodyAttention",
        "embed_dim=24 num_heads=3",
        **MASKED,
        code="scale-not-root",
        also=("scale-twice",),
        why="divided by d_head",
        mended=(("/ self.head_dim\n", "/ self.head_dim**0.5\n"),),
    ),
    Wrong(
        W,
        "LightAttention",
        DIM,
        weights=FUSED_D,
        code="scale-not-root",
        also=("scale-twice",),
        why="self.scale = 1 / head_dim",
        mended=(("1 / head_dim", "1 / head_dim**0.5"),),
    ),
    Wrong(
        S,
        "SpeechAttention",
        **CROSSED,
        code="scale-twice",
        why="the queries are scaled, and the scores again",
        mended=(("k.transpose(2, 3)) / math.sqrt(self.d_head)", "k.transpose(2, 3))"),),
        also=("scale-not-root",),
    ),
    Wrong(
        W,
        "QuickAttention",
        DIMN,
        weights=FUSED,
        code="scale-twice",
        why="the queries are scaled before torch's kernel, which scales too",
        mended=(("        q = q * self.scale\n", ""),),
        also=("scale-not-root",),
    ),
    # qk-swapped
    Wrong(
        S,
        "PoemAttention",
        **MASKED,
        weights="query key value proj",
        code="qk-swapped",
        why="k qᵀ",
        mended=(("k @ q.transpose", "q @ k.transpose"),),
        also=("qkv-order",),
    ),
    Wrong(
        S,
        "LetterAttention",
        "emb=24 heads=3",
        weights="toqueries tokeys tovalues unifyheads",
        code="qk-swapped",
        why="the layer named after keys makes the queries",
        mended=(
            ("queries = self.tokeys(x)", "queries = self.toqueries(x)"),
            ("keys = self.toqueries(x)", "keys = self.tokeys(x)"),
        ),
        also=("qkv-order",),
    ),
    Wrong(
        W,
        "MotifAttention",
        DIMN,
        weights=FUSED,
        code="qk-swapped",
        why="the einsum's result has its axes swapped",
        mended=(("->bhkq", "->bhqk"),),
        also=("qkv-order",),
    ),
    # causal
    Wrong(
        S,
        "CausalSelfAttention",
        "n_embd=24 n_head=3",
        sees="causal",
        weights="query key value proj",
        code="causal-missing",
        why="masked_fill without its underscore, and the result is thrown away",
        mended=(("        att.masked_fill(", "        att = att.masked_fill("),),
    ),
    Wrong(
        W,
        "CausalAttention",
        "n_embd=24 n_head=3",
        sees="causal",
        weights="fused:c_attn c_proj",
        code="causal-missing",
        why="torch's kernel without is_causal, in a class that says causal",
        mended=(("self.training else 0)", "self.training else 0, is_causal=True)"),),
    ),
    Wrong(
        W,
        "WriterAttention",
        "n_embd=24 n_head=3",
        sees="causal",
        weights="fused:c_attn c_proj",
        causal=True,
        code="causal-missing",
        why="nothing says causal but --causal",
        mended=(("(q, k, v)", "(q, k, v, is_causal=True)"),),
    ),
    Wrong(
        S,
        "StoryAttention",
        sees="causal",
        weights="q_proj k_proj v_proj o_proj",
        code="causal-off-by-one",
        why="triu(diagonal=0) hides a token from itself; the first row is uniform",
        mended=(("diagonal=0", "diagonal=1"),),
    ),
    Wrong(
        S,
        "DiaryAttention",
        sees="causal",
        weights="lin_q lin_k lin_v lin_o",
        code="causal-off-by-one",
        why="tril(diagonal=-1) hides a token from itself; the first row is NaN",
        mended=((", diagonal=-1", ""),),
        also=("fully-masked-row",),
    ),
    Wrong(
        S,
        "ChessAttention",
        sees="causal",
        weights="q k v o",
        code="causal-off-by-one",
        why="tril(diagonal=1) shows the next token",
        mended=(("tril(diagonal=1)", "tril()"),),
    ),
    Wrong(
        W,
        "NovelAttention",
        "emb_size=24 n_heads=3",
        sees="causal",
        weights=FUSED,
        code="causal-off-by-one",
        why="triu(diagonal=2) shows the next token; nothing says causal",
        mended=(("diagonal=2", "diagonal=1"),),
    ),
    Wrong(
        W,
        "VerseAttention",
        "emb_size=24 n_heads=3",
        sees="causal",
        weights=FUSED,
        code="causal-off-by-one",
        why="triu(diagonal=0) hides a token from itself; the first row is NaN",
        mended=(("diagonal=0", "diagonal=1"),),
        also=("fully-masked-row",),
    ),
    Wrong(
        S,
        "CommandAttention",
        sees="causal",
        code="causal-transposed",
        why="triu where tril is meant: the future is seen, the past is not",
        mended=(("torch.triu(", "torch.tril("),),
    ),
    Wrong(
        W,
        "EpisodeAttention",
        DIM,
        sees="causal",
        weights="fused:qkv out",
        code="causal-transposed",
        why="the past is hidden",
        mended=((".tril(-1)", ".triu(1)"),),
    ),
    Wrong(
        S,
        "ContinuationAttention",
        **CROSS,
        sees="causal",
        weights="q_proj k_proj v_proj o_proj",
        code="causal-top-left",
        why="tril of q_len × k_len, although the queries are the last of the keys",
        mended=(("device=query.device))", "device=query.device), diagonal=k_len - q_len)"),),
    ),
    Wrong(
        W,
        "NewestAttention",
        DIM,
        call="it(q, k)",
        sees="causal same-rows",
        weights="kv:to_q to_kv to_out",
        code="causal-top-left",
        why="torch's is_causal counts from the top left",
        mended=(
            (
                "is_causal=True",
                "attn_mask=torch.ones(n, memory.size(1), dtype=torch.bool, device=x.device).tril(memory.size(1) - n)",
            ),
        ),
    ),
    Wrong(
        W,
        "CachedAttention",
        DIM,
        call="it(x[:, 3:], it(x[:, :3])[1])[0]",
        sees="causal last-two",
        weights=FUSED,
        code="cache-mask",
        why="the same with a cache of keys and values: only the first token is seen while decoding",
        mended=(
            (
                "is_causal=True",
                "attn_mask=torch.ones(n, k.size(2), dtype=torch.bool, device=x.device).tril(k.size(2) - n)",
            ),
        ),
        hard=True,
        extra=True,
    ),
    Wrong(
        W,
        "TurnedCacheAttention",
        DIM,
        call="it(x[:, 3:], it(x[:, :3])[1])[0]",
        sees="causal last-two",
        weights=FUSED,
        rope="half",
        code="cache-position",
        why="the rotations of a step are those of the first positions, whatever is cached",
        mended=(("self.turned(q, 0), self.turned(k, 0)", "self.turned(q, start), self.turned(k, start)"),),
        extra=True,
    ),
    Wrong(
        W,
        "ReversedCacheAttention",
        DIM,
        call="it(x[:, 3:], it(x[:, :3])[1])[0]",
        sees="causal last-two",
        weights=FUSED,
        code="cache-order",
        why="the new values stand before the cached ones, the keys behind them",
        mended=(("torch.cat([v, past[1]], dim=2)", "torch.cat([past[1], v], dim=2)"),),
        extra=True,
    ),
    # mask-inverted
    Wrong(
        S,
        "TimetableAttention",
        sees="causal",
        code="mask-inverted",
        why="its own triangle the other way round: just the allowed keys are hidden, and the last row is uniform",
        mended=(("== 1", "== 0"),),
    ),
    Wrong(
        W,
        "PlotAttention",
        DIM,
        sees="causal",
        weights=FUSED,
        code="mask-inverted",
        why="its own triangle the other way round; the last row is NaN",
        mended=(("~future", "future"),),
    ),
    Wrong(
        S,
        "GraphAttention",
        "embed_dim=24 num_heads=3",
        **CROSSED,
        code="mask-inverted",
        why="documented as True = may attend, used as True = hide",
        mended=(("masked_fill(mask,", "masked_fill(~mask,"),),
    ),
    Wrong(
        W,
        "NetAttention",
        DIM,
        call="it(x, mask=~keep)",
        sees="mask",
        weights=FUSED,
        code="mask-inverted",
        why="documented as True = hide, given to torch's kernel, where True = attend",
        mended=(("attn_mask=mask", "attn_mask=None if mask is None else ~mask"),),
    ),
    Wrong(
        S,
        "RoomAttention",
        "embed_dim=24 num_heads=3",
        **CROSSED,
        options="--mask-means keep",
        code="mask-inverted",
        why="nothing says what True means but --mask-means keep",
        mended=(("masked_fill(mask,", "masked_fill(~mask,"),),
    ),
    # how a mask acts
    Wrong(
        S,
        "RecipeAttention",
        **CROSSED,
        code="mask-multiplied",
        why="scores · mask",
        mended=(("scores = scores * mask", 'scores = scores.masked_fill(mask == 0, float("-inf"))'),),
    ),
    Wrong(
        W,
        "SeriesAttention",
        DIM,
        sees="causal",
        weights=FUSED,
        code="mask-multiplied",
        why="scores · tril before the softmax",
        mended=(("scores * self.tril[:n, :n]", 'scores.masked_fill(self.tril[:n, :n] == 0, float("-inf"))'),),
    ),
    Wrong(
        S,
        "TicketAttention",
        call="it(q, k, v, mask=keep.to(q.dtype))",
        sees="mask",
        code="mask-added-as-01",
        why="documented as 1 and 0, and added to the scores",
        mended=(("scores = scores + mask", 'scores = scores.masked_fill(mask == 0, float("-inf"))'),),
    ),
    Wrong(
        W,
        "SignalAttention",
        DIM,
        sees="causal",
        weights=FUSED,
        code="mask-added-as-01",
        why="a tril of ones as torch's additive mask",
        mended=(("attn_mask=mask", "attn_mask=mask.bool()"),),
    ),
    Wrong(
        S,
        "EmailAttention",
        **CROSSED,
        code="mask-after-softmax",
        why="forbidden weights are erased after the softmax",
        mended=(
            (
                "        weights = F.softmax(scores, dim=-1)\n        if mask is not None:\n"
                "            weights = weights.masked_fill(mask == 0, 0.0)\n",
                "        if mask is not None:\n            scores = scores.masked_fill(mask == 0, -1e9)\n"
                "        weights = F.softmax(scores, dim=-1)\n",
            ),
        ),
    ),
    Wrong(
        W,
        "TrackAttention",
        DIM,
        sees="causal",
        weights=FUSED,
        code="mask-after-softmax",
        why="softmax · tril",
        mended=(
            (
                "F.softmax(scores, dim=-1) * self.tril[:n, :n]",
                "F.softmax(scores.masked_fill(self.tril[:n, :n] == 0, -torch.inf), dim=-1)",
            ),
        ),
    ),
    Wrong(
        S,
        "NewsAttention",
        **CROSSED,
        code="mask-sentinel-too-small",
        why="-1e4, which real scores can beat",
        mended=(("-1e4", 'float("-inf")'),),
        when="large",
    ),
    Wrong(
        S,
        "QuizAttention",
        **CROSSED,
        weights="q_linear k_linear v_linear out",
        code="mask-sentinel-too-small",
        why="1e-9, a slip of the sign for -1e9: a forbidden score is 0",
        mended=(("1e-9", "-1e9"),),
        also=("mask-multiplied",),
    ),
    Wrong(
        W,
        "TraceAttention",
        DIM,
        sees="causal",
        weights=FUSED,
        code="mask-sentinel-too-small",
        why="-100",
        mended=(("-100.0", 'float("-inf")'),),
        when="large",
    ),
    Wrong(
        S,
        "ProteinAttention",
        call="it(q, k, v, mask=keep.to(q.dtype))",
        sees="mask",
        code="mask-not-finite",
        why="(1 − mask) · −∞ is NaN where the mask is 1",
        mended=(('(1.0 - mask) * float("-inf")', "(1.0 - mask) * -1e30"),),
    ),
    Wrong(
        W,
        "PulseAttention",
        DIM,
        sees="causal",
        weights=FUSED,
        code="mask-not-finite",
        why="0 · −∞ is NaN",
        mended=(('future * float("-inf")', "future * -1e30"),),
    ),
    # padding
    Wrong(
        S,
        "ChatAttention",
        call="it(x, key_padding_mask=~real)",
        sees="causal left-padding",
        code="fully-masked-row",
        why="with padding on the left its own triangle leaves the first rows nothing: NaN",
        mended=((".softmax(dim=-1)", ".softmax(dim=-1).nan_to_num(0.0)"),),
    ),
    Wrong(
        W,
        "TalkAttention",
        DIM,
        call="it(x, attention_mask=real.long())",
        sees="causal left-padding",
        weights=FUSED,
        code="fully-masked-row",
        why="the same with an attention_mask of 1 and 0, in a layer that allows padding on the left",
        mended=(("scores.softmax(dim=-1)", "scores.softmax(dim=-1).nan_to_num(0.0)"),),
    ),
    Wrong(
        S,
        "SurveyAttention",
        call="it(x, key_padding_mask=~real)",
        sees="padding",
        code="padding-ignored",
        why="the result of masked_fill is thrown away",
        mended=(("            scores.masked_fill(", "            scores = scores.masked_fill("),),
    ),
    Wrong(
        W,
        "PollAttention",
        DIM,
        call="it(x, lengths=lengths)",
        sees="padding",
        weights=FUSED,
        code="padding-ignored",
        why="the mask is made from the lengths and never used",
        mended=(
            (
                "        weights = scores.softmax(dim=-1)\n",
                "        weights = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(dim=-1)\n",
            ),
        ),
    ),
    Wrong(
        S,
        "BasketAttention",
        call="it(x, key_padding_mask=~real)",
        sees="padding",
        code="padding-inverted",
        why="documented as True = padding, and what is not padding is hidden",
        mended=(("None, :] == 0", "None, :] != 0"),),
    ),
    Wrong(
        W,
        "CartAttention",
        DIM,
        call="it(x, lengths=lengths)",
        sees="padding",
        weights=FUSED,
        code="padding-inverted",
        why="arange ≥ lengths given to torch's kernel, where True = attend",
        mended=((">= lengths", "< lengths"),),
    ),
    # heads
    Wrong(
        S,
        "GroupedAttention",
        "d_model=24 n_heads=6 n_kv_heads=2",
        weights="wq wk wv wo",
        heads=6,
        kv_heads=2,
        code="gqa-tiled",
        why="k.repeat(1, n_rep, 1, 1) gives 0 1 0 1 0 1",
        mended=(
            ("k.repeat(1, self.n_rep, 1, 1)", "k.repeat_interleave(self.n_rep, 1)"),
            ("v.repeat(1, self.n_rep, 1, 1)", "v.repeat_interleave(self.n_rep, 1)"),
        ),
    ),
    Wrong(
        W,
        "SharedAttention",
        "dim=24 n_head=6 n_kv_head=2",
        weights="fused:qkv_proj o_proj",
        heads=6,
        kv_heads=2,
        code="gqa-tiled",
        why="torch.cat([k] * groups)",
        mended=(
            ("torch.cat([k] * groups, dim=1)", "k.repeat_interleave(groups, dim=1)"),
            ("torch.cat([v] * groups, dim=1)", "v.repeat_interleave(groups, dim=1)"),
        ),
    ),
    Wrong(
        S,
        "JuryAttention",
        **MASKED,
        code="heads-averaged",
        why="the mean over the heads goes into an output projection of d_head",
        mended=(
            ("z = z.mean(dim=1)", "z = z.transpose(1, 2).flatten(2)"),
            ("nn.Linear(self.d_head, d_model)", "nn.Linear(d_model, d_model)"),
        ),
    ),
    Wrong(
        W,
        "CouncilAttention",
        DIM,
        weights=FUSED,
        code="heads-averaged",
        why="the mean over the heads, repeated until the width fits",
        mended=(("z.mean(dim=1).repeat(1, 1, self.heads)", "z.transpose(1, 2).flatten(2)"),),
    ),
    Wrong(
        S,
        "ChoirAttention",
        call="it(x, mask=keep.squeeze(1))",
        sees="mask",
        weights="loop:heads.{i}.query heads.{i}.key heads.{i}.value out",
        code="heads-summed",
        why="the sum of the heads goes into an output projection of d_head",
        mended=(
            ("torch.stack(outputs).sum(dim=0)", "torch.cat(outputs, dim=-1)"),
            ("nn.Linear(d_head, d_model)", "nn.Linear(d_model, d_model)"),
        ),
    ),
    Wrong(
        W,
        "CrowdAttention",
        DIM,
        weights=FUSED,
        code="heads-summed",
        why="the einsum loses h",
        mended=(
            (
                '"bhqk,bkhd->bqd", scores.softmax(dim=-1), v)',
                '"bhqk,bkhd->bqhd", scores.softmax(dim=-1), v).flatten(2)',
            ),
            ("nn.Linear(dim // heads, dim)", "nn.Linear(dim, dim)"),
        ),
    ),
    Wrong(
        S,
        "OrchestraAttention",
        code="head-width",
        why="d_head and n_heads are swapped: eight heads of three columns instead of three of eight",
        mended=(("t, self.d_head, self.n_heads)", "t, self.n_heads, self.d_head)"),),
    ),
    Wrong(
        W,
        "NarrowAttention",
        "dim=36 heads=3",
        weights=FUSED,
        code="head-width",
        why="projections of d_head columns are split into heads once more: 3 heads of 4 columns instead of 12",
        mended=(("self.width = dim // heads", "self.width = dim"),),
    ),
    Wrong(
        "classics",
        "DecoderAttention",
        "d_model=36 n_heads=3",
        sees="causal",
        weights="W_Q W_K W_V W_O",
        code="head-width",
        why="projections of width d_k are split into heads once more; and −∞ · mask is NaN",
        mended=(
            ("self.d_k = d_model // n_heads", "self.d_k = d_model"),
            ("scores + -torch.inf * mask", "scores.masked_fill(mask == 1, -torch.inf)"),
        ),
        also=("mask-not-finite",),
    ),
    # projections
    Wrong(
        S,
        "MapAttention",
        **CROSSED,
        code="out-proj-missing",
        why="out_proj exists and is not used",
        mended=(
            (
                "return z.transpose(1, 2).contiguous().view(b, -1, self.n_heads * self.d_head)",
                "return self.out_proj(z.transpose(1, 2).contiguous().view(b, -1, self.n_heads * self.d_head))",
            ),
        ),
    ),
    Wrong(
        W,
        "BridgeAttention",
        DIMN,
        weights=FUSED,
        code="out-proj-missing",
        why="proj exists; only proj_drop is used",
        mended=(("self.proj_drop(x)", "self.proj_drop(self.proj(x))"),),
    ),
    Wrong(
        S,
        "StarAttention",
        code="out-proj-transposed",
        why="z @ weight of an nn.Linear",
        mended=(("self.out_proj.weight)", "self.out_proj.weight.T)"),),
    ),
    Wrong(
        W,
        "TowerAttention",
        DIMN,
        weights=FUSED,
        code="out-proj-transposed",
        why="an einsum over the first axis of an nn.Linear's weight",
        mended=(('"bnc,co->bno"', '"bnc,oc->bno"'),),
    ),
    Wrong(
        S,
        "RiverAttention",
        code="bias-missing",
        why="x @ weight.T of layers that have a bias: q, k and v",
        mended=(("x @ layer.weight.T", "layer(x)"),),
    ),
    Wrong(
        W,
        "StreetAttention",
        DIMN,
        weights=FUSED,
        code="bias-missing",
        why="F.linear without the bias of proj",
        mended=(("self.proj.weight)", "self.proj.weight, self.proj.bias)"),),
    ),
    Wrong(
        S,
        "GameAttention",
        **MASKED,
        weights="query key value proj",
        code="qkv-order",
        why="the layer named value makes the keys, and the one named key the values",
        mended=(("k = self.value(x)", "k = self.key(x)"), ("v = self.key(x)", "v = self.value(x)")),
    ),
    Wrong(
        W,
        "CellAttention",
        DIM,
        weights=FUSED,
        code="qkv-order",
        why="k, q, v from a layer named qkv",
        mended=(("k, q, v = (t", "q, k, v = (t"),),
        also=("qk-swapped",),
    ),
    Wrong(
        W,
        "AtomAttention",
        DIM,
        weights=FUSED_D,
        code="qkv-order",
        why="q, v, k from a layer named to_qkv",
        mended=(("q, v, k = ", "q, k, v = "),),
    ),
    Wrong(
        S,
        "RotaryAttention",
        weights="q_proj k_proj v_proj o_proj",
        rope="interleaved",
        code="rope-pairing",
        why="the angles lie for halves, but neighbours are rotated",
        mended=(("torch.cat((freqs, freqs), dim=-1)", "freqs.repeat_interleave(2, dim=-1)"),),
    ),
    Wrong(
        W,
        "SpiralAttention",
        DIM,
        weights=FUSED,
        rope="half",
        code="rope-pairing",
        why="documented as halves, and neighbours are turned",
        mended=(
            ("x[..., 0::2], x[..., 1::2]", "x.chunk(2, dim=-1)"),
            (
                "torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).flatten(-2)",
                "torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1)",
            ),
        ),
    ),
    Wrong(
        W,
        "TurningAttention",
        DIM,
        weights=FUSED,
        rope="interleaved",
        options="--rope interleaved",
        code="rope-pairing",
        why="nothing says how columns are paired but --rope interleaved",
        mended=(
            ("x.chunk(2, dim=-1)", "x[..., 0::2], x[..., 1::2]"),
            (
                "torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1)",
                "torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).flatten(-2)",
            ),
        ),
    ),
    # dropout, values, state
    Wrong(
        S,
        "NoisyAttention",
        **MASKED,
        code="dropout-in-eval",
        why="F.dropout, whose training is True unless told otherwise",
        mended=(("self.dropout)\n        return", "self.dropout, self.training)\n        return"),),
    ),
    Wrong(
        W,
        "DroppingAttention",
        DIM,
        weights=FUSED,
        code="dropout-in-eval",
        why="torch's kernel applies dropout_p always",
        mended=(("dropout_p=self.dropout", "dropout_p=self.dropout if self.training else 0.0"),),
    ),
    Wrong(
        S,
        "SparseAttention",
        "d_model=24 n_heads=3 dropout=0.5",
        code="dropout-not-rescaled",
        why="weights · kept, not divided by 1 − p",
        mended=(("weights * kept", "weights * kept / (1 - self.p)"),),
        when="training",
    ),
    Wrong(
        W,
        "ThinAttention",
        "dim=24 heads=3 drop_rate=0.5",
        weights=FUSED,
        code="dropout-not-rescaled",
        why="weights · bernoulli, not divided by 1 − p",
        mended=(("weights * keep", "weights * keep / (1 - self.drop_rate)"),),
        when="training",
    ),
    Wrong(
        S,
        "FlowerAttention",
        code="value-not-split",
        why="each head attends with the whole value; the output projection is wide enough to hide it",
        mended=(
            ("self.v_proj(x).unsqueeze(1)", "self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)"),
            ("nn.Linear(n_heads * d_model, d_model)", "nn.Linear(d_model, d_model)"),
        ),
    ),
    Wrong(
        W,
        "MixtureAttention",
        DIM,
        weights=FUSED,
        code="value-not-split",
        why="each head attends with the whole value, and the heads are averaged",
        mended=(
            ("v.unsqueeze(1)", "v.unflatten(-1, (self.heads, -1)).transpose(1, 2)"),
            ("z.mean(dim=1)", "z.transpose(1, 2).flatten(2)"),
        ),
        also=("heads-averaged", "pattern-of-one-head"),  # the mean of all patterns, times whole values, is the same
    ),
    Wrong(
        S,
        "StreamAttention",
        code="state-kept-between-calls",
        why="keys and values of earlier calls are attended to",
        mended=(("        self.cache = (k.detach(), v.detach())\n", ""),),
        when="second",
    ),
    Wrong(
        W,
        "BatchAttention",
        DIM,
        call="it(x, lengths)",
        sees="padding",
        weights=FUSED,
        code="state-kept-between-calls",
        why="the mask of the first batch is kept for later ones of the same shape",
        mended=(("        if self.mask is None or self.mask.shape != (b, 1, 1, n):\n", "        if True:\n"),),
        when="second",
    ),
    # beyond the list
    Wrong(
        S,
        "SharpAttention",
        **CROSSED,
        code="scale-multiplied",
        extra=True,
        why="times √d_head",
        mended=(("* math.sqrt", "/ math.sqrt"),),
    ),
    Wrong(
        W,
        "BrightAttention",
        DIM,
        weights=FUSED_D,
        code="scale-multiplied",
        extra=True,
        why="times √d_head",
        mended=(("** 0.5", "** -0.5"),),
    ),
    Wrong(
        S,
        "BirdAttention",
        **MASKED,
        code="scale-after-softmax",
        extra=True,
        why="the weights are divided, not the scores",
        mended=(
            (
                "F.softmax(scores, dim=-1) / math.sqrt(self.d_head)",
                "F.softmax(scores / math.sqrt(self.d_head), dim=-1)",
            ),
        ),
    ),
    Wrong(
        W,
        "LateAttention",
        DIM,
        weights=FUSED_D,
        code="scale-after-softmax",
        extra=True,
        why="the weights are multiplied, not the scores",
        mended=(("k.transpose(-2, -1)), dim=-1) * self.scale", "k.transpose(-2, -1)) * self.scale, dim=-1)"),),
    ),
    Wrong(
        S,
        "ExactAttention",
        code="softmax-overflow",
        extra=True,
        why="exp of the scores as they are: ∞ / ∞ is NaN",
        mended=(("torch.exp(scores)", "torch.exp(scores - scores.amax(dim=-1, keepdim=True))"),),
        when="large",
    ),
    Wrong(
        W,
        "RawAttention",
        DIM,
        weights=FUSED,
        code="softmax-overflow",
        extra=True,
        why="exp of the scores as they are",
        mended=(
            (
                "e = (q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)).exp()",
                "e = (q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)).softmax(dim=-1)",
            ),
        ),
        when="large",
    ),
    Wrong(
        S,
        "TravelAttention",
        **CROSSED,
        code="values-from-keys",
        extra=True,
        why="the values are made by k_proj, and v_proj is not used",
        mended=(("v = self.k_proj(value)", "v = self.v_proj(value)"),),
    ),
    Wrong(
        W,
        "EchoAttention",
        DIM,
        weights=FUSED,
        code="values-from-keys",
        extra=True,
        why="qkv[1] twice",
        mended=(("qkv[1], qkv[1]", "qkv[1], qkv[2]"),),
    ),
    Wrong(
        S,
        "CappedAttention",
        sees="causal",
        softcap=20.0,
        code="softcap-after-mask",
        extra=True,
        why="the cap turns −∞ into −20",
        mended=(
            (
                '        scores = scores.masked_fill(future, float("-inf"))\n'
                "        scores = self.softcap * torch.tanh(scores / self.softcap)\n",
                "        scores = self.softcap * torch.tanh(scores / self.softcap)\n"
                '        scores = scores.masked_fill(future, float("-inf"))\n',
            ),
        ),
        when="large",
    ),
    Wrong(
        W,
        "BoundAttention",
        DIM,
        sees="causal",
        weights=FUSED,
        softcap=20.0,
        code="softcap-not-scaled-back",
        extra=True,
        why="tanh(scores / cap) without the factor cap",
        mended=(("torch.tanh(scores / self.cap)", "self.cap * torch.tanh(scores / self.cap)"),),
    ),
    Wrong(
        S,
        "SchoolAttention",
        call="it(x, key_padding_mask=~real)",
        sees="padding",
        code="padding-of-queries",
        extra=True,
        why="the mask lies along the queries: padding sees nothing, but is seen",
        mended=(("[:, None, :, None]", "[:, None, None, :]"),),
        also=("padding-ignored",),
    ),
    Wrong(
        S,
        "FlatAttention",
        "units=24 num_heads=3",
        call="it(q, k, v, mask=~keep.squeeze(1))",
        sees="mask",
        code="mask-head-order",
        extra=True,
        why="batch × heads is one axis, batch outside, but the mask is repeated with the batch inside",
        mended=(("mask.repeat(self.num_heads, 1, 1)", "mask.repeat_interleave(self.num_heads, dim=0)"),),
    ),
    Wrong(
        S,
        "ForgetfulAttention",
        "d_model=24 n_heads=3 dropout=0.5",
        code="dropout-of-scores",
        extra=True,
        why="scores are dropped before the softmax",
        mended=(("F.softmax(self.dropout(scores), dim=-1)", "self.dropout(F.softmax(scores, dim=-1))"),),
        when="training",
    ),
    # functions
    Wrong(
        "functions",
        "attend_unscaled",
        "",
        **CROSS,
        weights="none",
        code="scale-missing",
        why="q·k as it is",
        mended=(("q @ k.transpose(-2, -1)", "q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))"),),
    ),
    Wrong(
        "functions",
        "attend_by_column",
        "",
        call="it(q, k, v, keep)",
        sees="mask",
        weights="none",
        code="softmax-axis",
        why="over queries",
        mended=(("dim=-2", "dim=-1"),),
    ),
    Wrong(
        "functions",
        "attend_by_width",
        "",
        **CROSS,
        weights="none",
        code="scale-not-root",
        also=("scale-twice",),
        why="divided by d_head",
        mended=(("/ q.shape[-1]", "/ q.shape[-1] ** 0.5"),),
    ),
    Wrong(
        "functions",
        "attend_hidden",
        "",
        call="it(q, k, v, keep)",
        sees="mask",
        weights="none",
        code="mask-inverted",
        why="documented as True = may see, used as True = hide",
        mended=(("masked_fill(mask", "masked_fill(~mask"),),
    ),
    Wrong(
        "functions",
        "attend_causally_from_the_start",
        "",
        **CROSS,
        sees="causal",
        weights="none",
        code="causal-top-left",
        why="torch's is_causal counts from the top left, the queries are documented as the last",
        mended=(
            (
                "is_causal=True",
                "attn_mask=torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril(k.size(-2) - q.size(-2))",
            ),
        ),
    ),
    Wrong(
        "functions",
        "attend_and_drop",
        "",
        **CROSS,
        weights="none",
        code="dropout-in-eval",
        why="a function has no eval: dropout by default, always",
        mended=(("dropout_p=dropout_p", "dropout_p=0.0"),),
        hard=True,
    ),
    # parts taken for others, axes out of order, other sizes in a scale
    Wrong(
        T,
        "HarbourAttention",
        code="value-of-one-head",
        why="the values of head 0 for all heads",
        mended=(("@ v[:, :1]\n", "@ v\n"),),
        extra=True,
    ),
    Wrong(
        T,
        "MeadowAttention",
        code="key-of-one-head",
        why="the keys of head 0 for all heads",
        mended=(("q @ k[:, 0].unsqueeze(1).transpose(-2, -1)", "q @ k.transpose(-2, -1)"),),
        extra=True,
    ),
    Wrong(
        T,
        "QuarryAttention",
        code="query-of-one-head",
        why="the queries of head 0 for all heads",
        mended=(("q[:, :1] @ k.transpose(-2, -1)", "q @ k.transpose(-2, -1)"),),
        extra=True,
    ),
    Wrong(
        T,
        "OrchardAttention",
        code="pattern-of-one-head",
        why="the mean of all patterns for every head",
        mended=(("scores.softmax(dim=-1).mean(dim=1, keepdim=True) @ v", "scores.softmax(dim=-1) @ v"),),
        extra=True,
    ),
    Wrong(
        T,
        "ValleyAttention",
        code="head-repeated",
        why="head 0 in the place of every head",
        mended=(("[z[:, 0]] * self.n_heads", "list(z.unbind(1))"),),
        extra=True,
    ),
    Wrong(
        T,
        "CanalAttention",
        code="merge-axis-order",
        why="transpose(2, 3) instead of transpose(1, 2)",
        mended=(("z.transpose(2, 3)", "z.transpose(1, 2)"),),
        extra=True,
    ),
    Wrong(
        T,
        "FerryAttention",
        code="merge-batch-moved",
        why="transpose(0, 1) instead of transpose(1, 2)",
        mended=(("z.transpose(0, 1)", "z.transpose(1, 2)"),),
        extra=True,
    ),
    Wrong(
        T,
        "PlaneAttention",
        code="merge-batch-moved",
        why="[batch · head, query, d_v] read as [head, batch, query, d_v]",
        mended=(
            (".view(self.n_heads, batch, length, self.d_head)", ".view(batch, self.n_heads, length, self.d_head)"),
            ("z.permute(1, 2, 0, 3)", "z.transpose(1, 2)"),
        ),
        extra=True,
    ),
    Wrong(
        T,
        "HamletAttention",
        code="attention-over-heads",
        why="the axis of the tokens is not moved behind that of the heads",
        mended=(
            (
                ".view(batch, length, self.n_heads, self.d_head)",
                ".view(batch, length, self.n_heads, self.d_head).transpose(1, 2)",
            ),
            ("z.flatten(2)", "z.transpose(1, 2).flatten(2)"),
        ),
        extra=True,
    ),
    Wrong(
        T,
        "MarketAttention",
        "d_model=24 n_heads=2",
        heads=2,
        code="scale-length",
        why="the root of the length in the place of the root of d_head",
        mended=(("math.sqrt(k.size(-2))", "math.sqrt(self.d_head)"),),
        extra=True,
    ),
    Wrong(
        T,
        "ForumAttention",
        code="scale-heads",
        why="the root of the number of heads in the place of the root of d_head",
        mended=(("math.sqrt(self.n_heads)", "math.sqrt(self.d_head)"),),
        extra=True,
    ),
    Wrong(
        T,
        "SpeechAttention",
        code="scale-one-side",
        why="the fourth root of d_head stands on the queries alone",
        mended=(("permute(0, 2, 3, 1)", "permute(0, 2, 3, 1) * scale"),),
        extra=True,
    ),
    Wrong(
        T,
        "FleetAttention",
        code="scale-batch",
        why="the first size of q, which is that of the batch",
        mended=(("math.sqrt(q.size(0))", "math.sqrt(self.d_head)"),),
        extra=True,
    ),
    Wrong(
        T,
        "LedgerAttention",
        code="pattern-transposed",
        why="the pattern is transposed",
        mended=(('torch.einsum("bhkq,bhkd->bhqd", scores.softmax(dim=-1), v)', "scores.softmax(dim=-1) @ v"),),
        extra=True,
    ),
    Wrong(
        T,
        "CourtAttention",
        code="softmax-axis",
        why="over queries and keys together",
        mended=(("F.softmax(scores.flatten(2), dim=-1).view_as(scores) @ v", "scores.softmax(dim=-1) @ v"),),
    ),
    Wrong(
        T,
        "GuardAttention",
        call="it(x, mask=keep)",
        sees="mask",
        code="mask-sign",
        why="10⁹ without the minus",
        mended=(("1e9", 'float("-inf")'),),
        extra=True,
    ),
    Wrong(
        T,
        "GateAttention",
        call="it(x, mask=keep)",
        sees="mask",
        code="mask-sentinel-too-small",
        why="1e-9 instead of -1e9",
        mended=(("1e-9", 'float("-inf")'),),
    ),
    Wrong(
        T,
        "WatchAttention",
        call="it(x, mask=keep)",
        sees="mask",
        code="mask-after-softmax",
        why="−10⁹ after the softmax",
        mended=(("shares.masked_fill(hidden, -1e9)", "scores.masked_fill(hidden, -math.inf).softmax(dim=-1)"),),
    ),
    Wrong(
        T,
        "MirrorAttention",
        code="queries-from-keys",
        why="both with the projection of the keys",
        mended=(("q = self.k_proj(x)", "q = self.q_proj(x)"),),
        extra=True,
    ),
    Wrong(
        T,
        "TwinAttention",
        code="keys-from-queries",
        why="both with the projection of the queries",
        mended=(("k = self.q_proj(x)", "k = self.k_proj(x)"),),
        extra=True,
    ),
    Wrong(
        T,
        "ParrotAttention",
        code="values-from-queries",
        why="the values with the projection of the queries",
        mended=(("v = self.q_proj(x)", "v = self.v_proj(x)"),),
        extra=True,
    ),
    Wrong(
        T,
        "VaultAttention",
        code="keys-from-values",
        why="the keys with the projection of the values",
        mended=(("k = self.v_proj(x)", "k = self.k_proj(x)"),),
        extra=True,
    ),
    Wrong(
        T,
        "OracleAttention",
        code="queries-from-values",
        why="the queries with the projection of the values",
        mended=(("q = self.v_proj(x)", "q = self.q_proj(x)"),),
        extra=True,
    ),
    Wrong(
        T,
        "PanelAttention",
        "d_model=24 n_heads=6 n_kv_heads=2",
        heads=6,
        kv_heads=2,
        code="gqa-tiled",
        why="the keys alone are tiled",
        mended=(("k.repeat(1, self.n_rep, 1, 1)", "k.repeat_interleave(self.n_rep, dim=1)"),),
    ),
    Wrong(
        T,
        "SenateAttention",
        "d_model=24 n_heads=6 n_kv_heads=2",
        heads=6,
        kv_heads=2,
        code="gqa-tiled",
        why="the values alone are tiled",
        mended=(("v.repeat(1, self.n_rep, 1, 1)", "v.repeat_interleave(self.n_rep, dim=1)"),),
    ),
)

R, K = "right", "right_known"
SEPARATE = "q_proj k_proj v_proj o_proj"

RIGHT = (
    Right(
        "classics",
        "MultiHeadAttention",
        "d_model=24 num_heads=3",
        **CROSSED,
        weights="W_q W_k W_v W_o",
        choices=("mask-keeps", "empty-row-mean"),
    ),
    Right(
        "classics",
        "CarefulAttention",
        "emb_dim=24 num_heads=3",
        weights="to_q to_k to_v to_out",
        choices=("no-bias", "dropout"),
    ),
    Right(R, "Fused", DIMN, weights=FUSED),
    Right(R, "Einsum", weights="kv:q kv out", call="it(q, k)", sees="same-rows"),
    Right(
        R,
        "LoopOverHeads",
        "n_embd=24 num_heads=3",
        sees="causal",
        weights="loop:heads.{i}.query heads.{i}.key heads.{i}.value proj",
        choices=("causal", "some-biases", "dropout"),
    ),
    Right(R, "TorchKernel", sees="causal", weights=SEPARATE, choices=("causal", "dropout")),
    Right(
        R,
        "Wrapped",
        "hidden=24 heads=3",
        weights="torch:layer",
        call="it(x, key_padding_mask=~real)",
        sees="padding",
        choices=("mask-hides", "dropout"),
    ),
    Right(
        "",
        "torch.nn:MultiheadAttention",
        "embed_dim=24 num_heads=3 batch_first=true",
        call="it(q, k, v)[0]",
        weights="torch:",
        choices=("returns-pattern",),
        note="returns the mean of the heads' patterns",
    ),
    Right(
        "",
        "torch.nn:MultiheadAttention",
        "embed_dim=24 num_heads=3",
        call="it(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), key_padding_mask=~real)[0].transpose(0, 1)",
        sees="padding",
        weights="torch:",
        choices=("batch-second", "returns-pattern"),
    ),
    Right(
        R,
        "BatchSecond",
        "width=24 n_heads=3",
        call="it(x.transpose(0, 1)).transpose(0, 1)",
        weights="fused:in_proj out_proj",
        choices=("batch-second",),
    ),
    Right(
        R,
        "BatchSecondByName",
        "embed_dim=24 num_heads=3",
        call="it(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)).transpose(0, 1)",
        choices=("batch-second",),
    ),
    Right(
        R,
        "KeywordOnly",
        call="it(query=q, key=k, value=v, mask=keep)",
        sees="mask",
        weights="query_proj key_proj value_proj output_proj",
        choices=("mask-keeps",),
    ),
    Right(R, "WithDropout", **MASKED, weights="wq wk wv wo", choices=("dropout", "mask-keeps")),
    Right(R, "ReturnsPattern", call="it(x)[0]", choices=("returns-pattern",)),
    Right(R, "ReturnsDict", call="it(x)['output']", weights="fused:qkv out", choices=("returns-pattern",)),
    Right(
        R,
        "GroupedRepeat",
        "d_model=24 n_heads=6 n_kv_heads=2",
        weights=SEPARATE,
        heads=6,
        kv_heads=2,
        choices=("grouped-queries", "no-bias"),
    ),
    Right(
        R,
        "GroupedExpand",
        "dim=24 n_heads=6 n_kv_heads=2",
        sees="causal",
        weights="wq wk wv wo",
        heads=6,
        kv_heads=2,
        choices=("grouped-queries", "no-bias", "causal"),
    ),
    Right(R, "MultiQuery", DIMN, weights="kv:q kv proj", kv_heads=1, choices=("grouped-queries",)),
    Right(
        R,
        "RopeHalf",
        "hidden_size=24 num_attention_heads=3",
        sees="causal",
        weights=SEPARATE,
        rope="half",
        choices=("rope-half", "causal", "no-bias"),
    ),
    Right(
        R,
        "RopeComplex",
        "dim=24 n_heads=3",
        weights="wq wk wv wo",
        rope="interleaved",
        choices=("rope-interleaved", "no-bias"),
    ),
    Right(
        R,
        "Unscaled",
        "d_model=24 d_kv=5 num_heads=3",
        weights="q k v o",
        call="it(q, k)",
        sees="same-rows",
        scale=1.0,
        choices=("other-scale", "no-bias", "head-width"),
    ),
    Right(R, "RawParameters", weights="matrices:W_q W_k W_v W_o", choices=("weights-in-out", "no-bias")),
    Right(
        R,
        "Kernels",
        "d_model=24 n_heads=3 d_head=5",
        sees="causal",
        weights="kernels:",
        choices=("causal", "head-width"),
    ),
    Right(
        R,
        "Gpt2Style",
        "n_embd=24 n_head=3",
        sees="causal",
        weights="conv1d:c_attn c_proj",
        choices=("weights-in-out", "causal"),
    ),
    Right(
        R,
        "PaddingMask",
        "embed_dim=24 num_heads=3",
        call="it(x, key_padding_mask=~real)",
        sees="padding",
        choices=("mask-hides",),
    ),
    Right(R, "Lengths", call="it(x, lengths=lengths)", sees="padding", weights="fused:qkv out"),
    Right(
        R,
        "CausalWithPadding",
        call="it(x, attention_mask=real.long())",
        sees="causal left-padding",
        weights="fused:qkv out",
        choices=("causal", "mask-keeps"),
    ),
    Right(
        R,
        "KeyValueCache",
        call="it(x[:, 3:], it(x[:, :3])[1])[0]",
        sees="causal last-two",
        weights="fused:qkv out",
        choices=("causal",),
    ),
    Right(
        R,
        "OtherValueWidth",
        "d_model=24 n_heads=3 d_k=5 d_v=7",
        **CROSSED,
        weights="w_qs w_ks w_vs fc",
        choices=("value-width", "no-bias", "head-width", "mask-keeps"),
    ),
    Right(R, "NoBias", weights=SEPARATE, choices=("no-bias",)),
    Right(R, "NoOutputProjection", weights="query key value -", choices=("no-output-projection",)),
    Right(R, "OwnScale", weights="fused:qkv out"),
    Right(
        R, "OwnScale", "d_model=24 n_heads=3 scale=0.5", weights="fused:qkv out", scale=0.5, choices=("other-scale",)
    ),
    Right(
        R,
        "SingleSoftmax",
        "hidden_size=24 num_heads=3",
        weights=SEPARATE,
        choices=("float32-softmax",),
        atol=1e-5,
        note="float64 in, but float32 within: equal to 1e-6 only",
    ),
    Right(R, "Talkative", weights="fused:qkv out"),
    Right(
        R,
        "AdditiveMask",
        "n_state=24 n_head=3",
        call="it(x, torch.where(keep, 0.0, -math.inf).to(x.dtype))",
        sees="mask",
        weights="query key value out",
        choices=("some-biases", "mask-added"),
    ),
    Right(
        R,
        "UndocumentedMask",
        "embed_dim=24 num_heads=3",
        call="it(q, k, v, mask=~keep)",
        sees="mask",
        choices=("mask-hides",),
        note="the same code with --mask-means keep is wrong",
    ),
    Right(R, "StridedHeads", weights="strided:qkv out", choices=("strided-heads",)),
    Right(R, "Capped", sees="causal", weights="fused:qkv out", softcap=5.0, choices=("softcap", "causal")),
    Right(R, "Functional", "width=24 n_heads=3", weights="dictionary:q k v out"),
    Right(
        R,
        "AttentionWithoutModule",
        weights="matrices:q k v o",
        choices=("no-bias",),
        note="no nn.Module: its weights are attributes",
    ),
    Right(
        K,
        "ConfiguredAttention",
        "n_embd=24 n_head=3",
        sees="causal",
        weights="fused:c_attn c_proj",
        causal=True,
        choices=("causal", "dropout"),
    ),
    Right(
        K,
        "MultiHeadedAttention",
        "h=3 d_model=24",
        call="it(q, k, v, mask=keep.squeeze(1))",
        sees="mask",
        weights="linears.0 linears.1 linears.2 linears.3",
        choices=("mask-keeps", "dropout"),
    ),
    Right(
        K,
        "SelfAttention",
        "embed_size=24 heads=3",
        call="it(v, k, q, keep)",
        sees="mask",
        weights="queries keys values fc_out",
        choices=("mask-keeps",),
    ),
    Right(
        K,
        "MultiHeadAttention",
        "d_in=24 d_out=24 context_length=32 dropout=0.1 num_heads=3 qkv_bias=true",
        sees="causal",
        weights="W_query W_key W_value out_proj",
        causal=True,
        choices=("causal", "dropout"),
    ),
    Right(
        K,
        "MultiHeadAttention",
        "d_in=20 d_out=24 context_length=32 dropout=0.0 num_heads=3",
        sees="causal",
        weights="W_query W_key W_value out_proj",
        choices=("causal", "some-biases"),
    ),
    Right(
        K,
        "Attention",
        "dim=24 heads=3 dim_head=5",
        weights="fused:to_qkv to_out.0",
        choices=("some-biases", "head-width"),
    ),
    Right(
        K,
        "CrossAttention",
        "dim=24 context_dim=20 heads=3 dim_head=5",
        call="it(q, k, mask=real)",
        sees="same-rows padding",
        weights="to_q to_k to_v to_out",
        choices=("some-biases", "head-width", "mask-keeps"),
    ),
    Right(
        K,
        "BertSelfAttention",
        "hidden_size=24 num_attention_heads=3",
        call="it(x, torch.where(real, 0.0, -10000.0)[:, None, None, :].to(x.dtype))[0]",
        sees="padding",
        weights="query key value -",
        choices=("no-output-projection", "mask-added", "dropout"),
    ),
    Right(
        K,
        "MultiheadAttention",
        "input_dim=24 embed_dim=24 num_heads=3",
        **MASKED,
        weights="per-head:qkv_proj o_proj",
        choices=("fused-per-head", "mask-keeps"),
    ),
    Right(
        K,
        "WideHeads",
        "emb=24 heads=3",
        weights="toqueries tokeys tovalues unifyheads",
        choices=("some-biases", "head-width"),
    ),
    Right(
        K,
        "SelfAttentionWide",
        "num_hiddens=24 num_heads=3",
        call="it(q, k, v, lengths)",
        sees="padding",
        weights="W_q W_k W_v W_o",
        choices=("no-bias", "dropout"),
        note="−10⁶ is beaten by scores below it only; with lengths, not a mask",
    ),
    Right("functions", "attend", "", **CROSS, weights="none"),
    Right(
        "functions",
        "attention",
        "",
        call="it(q, k, v, mask=keep)[0]",
        sees="mask",
        weights="none",
        choices=("mask-keeps", "returns-pattern"),
    ),
    Right(
        "functions",
        "attend_with_torch",
        "",
        call="it(q, k, v, keep)",
        sees="mask",
        weights="none",
        choices=("mask-keeps",),
    ),
    Right("functions", "attend_by_einsum", "", call="it(queries=q, keys=k, values=v)", weights="none"),
    Right("functions", "attend_causally", "", **CROSS, sees="causal", weights="none", choices=("causal",)),
    Right("functions", "attend_in_loops", "", **CROSS, weights="none"),
)

T = "troublesome"

TROUBLES = (
    Trouble(T, "Shouts", verdict=("right",), note="what it prints must not reach stdout, nor be taken for the answer"),
    Trouble(T, "Counts", verdict=("right",), note="keeps a number that nothing depends on"),
    Trouble(T, "Drifts", verdict=("wrong",), says=("state-kept-between-calls",)),
    Trouble(T, "WantsKeyword", says=("temperature_schedule", "--call-arg")),
    Trouble(T, "WantsKeyword", options="--call-arg temperature_schedule=1.0", verdict=("right",)),
    Trouble(T, "WantsArgument", says=("flux_capacity", "--arg")),
    Trouble(T, "WantsArgument", "d_model=24 n_heads=3 flux_capacity=2", verdict=("right",)),
    Trouble(T, "RaisesInForward", says=("the tide table was not loaded", "troublesome.py")),
    Trouble(T, "RaisesInConstructor", says=("licence file not found",)),
    Trouble(T, "RaisesForOddLengths", verdict=("right", "unknown"), says=()),
    Trouble(T, "WantsLengthSixteen", verdict=("right", "unknown"), says=()),
    Trouble(T, "Sleeps", verdict=("right", "unknown"), note="a second for each call"),
    Trouble(T, "NeverReturns", options="--time-limit 2", says=("2 s",)),
    Trouble(T, "NeverReturnsBusily", options="--time-limit 2", says=("2 s",)),
    Trouble(T, "NeverBuilt", options="--time-limit 2"),
    Trouble(T, "NeedsCuda", says=("CUDA", "--device"), note="where there is a GPU: right"),
    Trouble(T, "Exits", says=("exit",)),
    Trouble(T, "Crashes", says=("7",)),
    Trouble(T, "ReturnsNothing", says=("None",)),
    Trouble(T, "ReturnsNumpy", says=("ndarray",)),
    Trouble(T, "ReturnsOtherShape", says=("shape",)),
    Trouble(T, "ChangesItsInput", verdict=("wrong", "unknown"), says=("input",)),
    Trouble(T, "HugeOutput", says=("shape",)),
    Trouble(T, "HugeMemory", says=("memory",)),
    Trouble(T, "Random", verdict=("wrong", "unknown"), note="differs from call to call in eval, and not by dropout"),
    Trouble(T, "FloatOnly", verdict=("right",), note="float32 whatever comes"),
    Trouble(T, "TakesTokenIds", "", verdict=("unknown",)),
    Trouble(T, "Normalizes", verdict=("unknown",), note="a block: a norm before and a residual after"),
    Trouble(T, "NoAttention", "d_model=24", verdict=("unknown",)),
    Trouble(T, "NoForward", verdict=("unknown",), says=("forward",)),
    Trouble(T, "NOT_CALLABLE", "", says=("NOT_CALLABLE",)),
    Trouble(T, "Atention", says=("Atention", "Plain"), note="no such name: list what there is"),
    Trouble("raises_on_import", "Attention", "", says=("the table holds infinities", "raises_on_import.py", "6")),
    Trouble("misses_a_package", "Attention", "", says=("einops_of_the_future",)),
    Trouble("prints_on_import", "Attention", verdict=("right",)),
    Trouble("exits_on_import", "Attention", "", says=("usage: exits_on_import.py FILE",)),
    Trouble("never_imported", "Attention", "", options="--time-limit 2"),
    Trouble(
        "syntax_error",
        "Attention",
        "",
        says=("syntax_error.py", "8"),
        note="copy syntax_error.py.txt to syntax_error.py first",
    ),
)

U = "unusual"
NEVER_WRONG = "documented; where the reference knows nothing of it, unknown, but never wrong"

UNUSUAL = (
    Unusual(U, "LearnedTemperature", DIM, note="a scale that is a parameter of its own"),
    Unusual(U, "NormalizedQueriesAndKeys", DIMN, note=NEVER_WRONG),
    Unusual(U, "CosineAttention", DIM, note=NEVER_WRONG),
    Unusual(U, "DistancePenalty", DIM, note=NEVER_WRONG),
    Unusual(U, "RelativeBias", DIM, note=NEVER_WRONG),
    Unusual(U, "SlidingWindow", DIM, note="no triangle, but one that is documented"),
    Unusual(U, "AttentionSink", DIM, note="rows do not sum to 1, as documented"),
    Unusual(U, "TalkingHeads", DIM, note="dim=-2 of a softmax is the axis of keys here"),
    Unusual(U, "LinearAttention", DIM, note=NEVER_WRONG),
    Unusual(U, "InterpretableAttention", note="heads averaged, as documented"),
    Unusual(
        U, "SharedHeadProjections", "embed_size=24 heads=3", call="it(v, k, q, keep)", note="block-diagonal projections"
    ),
    Unusual(
        U,
        "SharedHeadsWideScale",
        "embed_size=24 heads=3",
        call="it(v, k, q, keep)",
        verdict=("wrong", "unknown"),
        code="scale-d-model",
        note="the same, divided by √embed_size: a well-known tutorial",
    ),
    Unusual(U, "SilentlyBatchSecond", "width=24 n_heads=3", note="attends along the first axis, and nothing says so"),
    Unusual(
        U,
        "UnplacedQueries",
        call="it(q, k, v)",
        verdict=("right", "unknown", "wrong"),
        code="causal-top-left",
        note="where the queries stand among more keys is nowhere said; with as many of both it is right",
    ),
    Unusual(
        U,
        "UnseenKeyBias",
        verdict=("right", "wrong"),
        code="bias-missing",
        note="q·b is the same for all keys and cancels in the softmax: no output can tell, only a trace or an unused parameter",
    ),
    Unusual(
        U,
        "TwoMasksAtOnce",
        DIM,
        call="it(x, mask=keep)",
        note="a row that may see nothing gives the mean of all values",
    ),
    Unusual(U, "MeanRescaled", DIM, note="drops keys before the softmax, as documented"),
    Unusual(U, "GatedAttention", DIM, note=NEVER_WRONG),
    Unusual(U, "OneTokenMore", DIM, note="returns one row more than it was given"),
    Unusual(
        "functions",
        "functional_attention",
        "",
        note="a function of x and of weights: which are which can be read from the names only",
    ),
    Unusual(K, "CausalSelfAttention", "", note="wants a config object; GPTConfig of the same file has defaults"),
)

ALL: tuple[Case, ...] = (*WRONG, *RIGHT, *UNUSUAL, *TROUBLES)
