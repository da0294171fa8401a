"""Weights on disk: every bit comes back, and a matrix that was changed after saving is noticed."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys

import pytest
import safetensors
import safetensors.torch
import torch
from support import oracle

from mhacli.attention import layer_file as weights
from mhacli.attention.layer_file import LayerWeights, from_file, new_attention, to_bytes
from mhacli.checkpoints.mha_weights import expected_shapes, read_layer_file
from mhacli.compute.layer.run import inspect, weights_content
from mhacli.errors import MhaError, UsageError
from mhacli.requests.layer import layer_request
from mhacli.spec.config import Config
from mhacli.text.encode import encode
from mhacli.text.vocabulary import as_stored

GROUPED = Config(d_model=10, n_heads=6, n_kv_heads=2, d_head=3, d_v=5, init="uniform", dtype="float64")
LEARNED = {"positions": "learned", "max_positions": 6}
SQUARE = Config(d_model=6, n_heads=3, init="uniform", dtype="float64")
WORDS = ("cat", "mat", "on", "sat", "the", "zoo")


def layer_of(config, seed=0):
    config = config.resolved()
    generator = torch.Generator().manual_seed(seed)
    attention = new_attention(config, generator)
    embedding = torch.randn(len(WORDS), config.d_input, generator=generator, dtype=torch.float64)
    dtype, table = getattr(torch, config.dtype), None
    if config.positions == "learned":
        table = torch.randn(config.max_positions, config.d_input, generator=generator, dtype=torch.float64).to(dtype)
    return LayerWeights(embedding.to(dtype), attention, table)


def tensors_of(layer):
    table = {} if layer.position_table is None else {"embed_positions.weight": layer.position_table}
    return {"embed.weight": layer.embedding, **table, **layer.attention.state_dict()}


def saved(path, config, layer=None):
    path.write_bytes(to_bytes(layer or layer_of(config), config.resolved(), WORDS))
    return str(path)


def loaded(path, given=None, **how):
    return from_file(read_layer_file(path, given or {}), **{"allow_nonfinite": False, **how})


def rewritten(path, change):
    """The same file, its metadata untouched, with tensors changed by `change(tensors)`."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path, metadata=metadata)
    return path


def refused(call, *arguments, kind=MhaError, **named):
    with pytest.raises(kind) as caught:
        call(*arguments, **named)
    return caught.value


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out_proj", [True, False])
@pytest.mark.parametrize("choices", [{}, LEARNED, {"d_input": 4}, {"d_input": 4, **LEARNED}])
def test_every_bit_comes_back_in_every_dtype(dtype, bias, out_proj, choices, tmp_path):
    config = Config(**{**vars(GROUPED), "dtype": dtype, "bias": bias, "out_proj": out_proj, **choices})
    layer = layer_of(config)
    path = saved(tmp_path / "w.safetensors", config, layer)
    found, expected = tensors_of(loaded(path)), tensors_of(layer)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == getattr(torch, dtype)
        assert torch.equal(found[name], tensor), name


def test_another_dtype_on_loading_rounds_the_saved_numbers_once(tmp_path):
    layer = layer_of(GROUPED)
    found = tensors_of(loaded(saved(tmp_path / "w.safetensors", GROUPED, layer), {"dtype": "bfloat16"}))
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in tensors_of(layer).items())


def test_a_plain_reader_finds_the_tensors_and_one_metadata_key(tmp_path):
    layer = layer_of(GROUPED)
    path = saved(tmp_path / "w.safetensors", GROUPED, layer)
    plain = safetensors.torch.load_file(path)
    assert {name: tuple(t.shape) for name, t in plain.items()} == expected_shapes(GROUPED.resolved(), 6)
    assert all(torch.equal(tensor, plain[name]) for name, tensor in tensors_of(layer).items())
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert list(metadata) == ["mha"]
    document = json.loads(metadata["mha"])
    assert metadata["mha"] == json.dumps(document, sort_keys=True, separators=(",", ":"))
    assert sorted(document) == ["config", "format", "probe", "tokenizer", "vocabulary"]
    assert (document["format"], document["tokenizer"]) == ("mha.weights/1", "word")
    assert document["vocabulary"] == list(WORDS)
    of_a_run = {"train", "device", "threads", "seed", "init", "random", "distribution", "documents", "padding"}
    assert not {*of_a_run, "score_bias"} & document["config"].keys()
    assert {"positions", "rope_theta", "max_positions", "d_input", "prefix", "sink"} <= document["config"].keys()


def test_by_hand_the_shapes_on_disk_follow_the_names():
    assert expected_shapes(GROUPED.resolved(), 7) == {
        "embed.weight": (7, 10), "q_proj.weight": (18, 10), "q_proj.bias": (18,), "k_proj.weight": (6, 10),
        "k_proj.bias": (6,), "v_proj.weight": (10, 10), "v_proj.bias": (10,), "o_proj.weight": (10, 30),
        "o_proj.bias": (10,),
    }  # fmt: skip
    narrow = Config(**{**vars(GROUPED), "d_input": 4, "bias": False, **LEARNED}).resolved()
    assert expected_shapes(narrow, 7) == {
        "embed.weight": (7, 4), "embed_positions.weight": (6, 4), "q_proj.weight": (18, 4), "k_proj.weight": (6, 4),
        "v_proj.weight": (10, 4), "o_proj.weight": (10, 30),
    }  # fmt: skip


SCRIPT = """
import hashlib, sys, torch
sys.path[:0] = sys.argv[1:]
from test_layer_file import GROUPED, WORDS, layer_of
from mhacli.attention.layer_file import to_bytes
print(hashlib.sha256(to_bytes(layer_of(GROUPED), GROUPED.resolved(), WORDS)).hexdigest())
"""


@pytest.mark.full
def test_the_same_layer_gives_the_same_bytes_in_another_process(request):
    first, second = (to_bytes(layer_of(GROUPED), GROUPED.resolved(), WORDS) for _ in range(2))
    assert first == second
    elsewhere = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(request.path.parent), str(request.path.parents[2])],
        capture_output=True,
        text=True,
        check=True,
    )
    assert elsewhere.stdout.strip() == hashlib.sha256(first).hexdigest()


def test_choices_of_the_run_do_not_reach_the_bytes():
    elsewhere = Config(
        **{**vars(GROUPED), "device": "cuda:3", "threads": 2, "seed": 9, "dropout": 0.0, "padding": "left",
           "random": (2, 5), "distribution": "uniform", "score_bias": "b.safetensors"}
    )  # fmt: skip
    layer = layer_of(GROUPED)
    assert to_bytes(layer, elsewhere.resolved(), WORDS) == to_bytes(layer, GROUPED.resolved(), WORDS)


def test_the_config_comes_back_with_the_layer(tmp_path):
    config = Config(**{**vars(GROUPED), "softcap": 7.5, "scale": 0.25, "causal": True, "positions": "none"})
    source = read_layer_file(saved(tmp_path / "w.safetensors", config), {"device": "cpu"})
    kept = {**vars(config.resolved()), "init": "xavier", "device": "cpu"}
    assert vars(source.config) == kept
    assert source.metadata.vocabulary == WORDS
    attention = loaded(source.path).attention
    assert (attention.scale, attention.softcap, attention.training) == (0.25, 7.5, False)


@pytest.mark.parametrize("name", ["embed", "embed_positions", "q_proj", "k_proj", "v_proj", "o_proj"])
def test_a_transposed_square_matrix_is_noticed(name, tmp_path):
    def transpose(tensors):
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].T.contiguous()

    path = rewritten(saved(tmp_path / "w.safetensors", Config(**{**vars(SQUARE), **LEARNED})), transpose)
    fault = refused(loaded, path)
    assert (fault.exit_code, fault.code, fault.path) == (3, "probe-mismatch", path)
    start, _, difference = fault.message.rpartition(" ")
    assert start == f"{path}: {name}.weight does not give the stored probe outputs: they differ by"
    assert 1e-3 < float(difference) < 100
    assert fault.hint == "the weights were changed after saving; a transposed square matrix causes this"


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj"])
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_two_exchanged_rows_are_noticed(name, part, tmp_path):
    def exchange(tensors):
        tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"][[1, 0, 2, 3, 4, 5]]

    path = rewritten(saved(tmp_path / "w.safetensors", SQUARE), exchange)
    assert refused(loaded, path).message.startswith(f"{path}: {name}.weight ")


def test_two_exchanged_places_of_the_position_table_are_noticed(tmp_path):
    def exchange(tensors):
        tensors["embed_positions.weight"] = tensors["embed_positions.weight"][[0, 1, 3, 2, 4, 5]]

    path = rewritten(saved(tmp_path / "w.safetensors", Config(**{**vars(SQUARE), **LEARNED})), exchange)
    assert refused(loaded, path).message.startswith(f"{path}: embed_positions.weight ")


@pytest.mark.parametrize("positions", ["none", "rope", "alibi"])
def test_a_table_of_positions_is_left_out_where_positions_are_others(positions, tmp_path):
    config = Config(**{**vars(GROUPED), **LEARNED, "d_head": 4})
    layer = layer_of(config)
    found = loaded(saved(tmp_path / "w.safetensors", config, layer), {"positions": positions})
    assert found.position_table is None
    assert found.attention.positions == positions
    assert torch.equal(found.embedding, layer.embedding)


def test_learned_positions_need_their_table(tmp_path):
    path = saved(tmp_path / "w.safetensors", Config(**{**vars(GROUPED), "max_positions": 6}))
    fault = refused(read_layer_file, path, {"positions": "learned"})
    assert fault.message == f"{path} does not have the tensors of its layer: embed_positions.weight [6, 10] is missing"


@pytest.mark.parametrize("shape", [(), (6,), (6, 9), (2, 6, 10)])
@pytest.mark.parametrize("positions", ["learned", "none"])
def test_a_table_of_positions_of_another_shape_is_refused_whatever_the_positions(shape, positions, tmp_path):
    def reshape(tensors):
        tensors["embed_positions.weight"] = torch.zeros(shape, dtype=torch.float64)

    config = Config(**{**vars(GROUPED), "positions": positions, "max_positions": 6})
    path = rewritten(saved(tmp_path / "w.safetensors", config), reshape)
    assert refused(loaded, path).message.startswith(path)


def new(**choices):
    return weights.new_layer(Config(**{**vars(GROUPED), "d_head": 4, **choices}).resolved(), len(WORDS))


@pytest.mark.parametrize("positions", ["learned", "rope", "rope-interleaved", "alibi", "none"])
def test_other_positions_leave_the_random_weights_alone(positions):
    one, other = new(), new(positions=positions)
    assert torch.equal(one.embedding, other.embedding)
    for name, tensor in one.attention.state_dict().items():
        assert torch.equal(tensor, other.attention.state_dict()[name])
    assert (other.position_table is not None) == (positions == "learned")


def test_a_new_table_of_positions_is_normal_numbers_from_the_seed_alone():
    sizes = {"positions": "learned", "max_positions": 500, "d_input": 20}
    first, again, other = (new(**sizes, seed=seed).position_table for seed in (3, 3, 4))
    assert (first.shape, first.dtype) == ((500, 20), torch.float64)
    assert first.mean().item() == pytest.approx(0.0, abs=0.03)
    assert first.std().item() == pytest.approx(1.0, abs=0.03)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[: len(WORDS)], new(**sizes, seed=3).embedding)
    assert new(**sizes, seed=2**64 - 1).position_table.shape == (500, 20)


def test_the_probe_forgives_the_rounding_of_other_machines(tmp_path):
    def nudge(tensors):
        for tensor in tensors.values():
            tensor *= 1 + 1e-9

    loaded(rewritten(saved(tmp_path / "w.safetensors", SQUARE), nudge))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused_with_count_and_place(poison, tmp_path):
    def spoil(tensors):
        tensors["k_proj.weight"][1, 3] = poison
        tensors["k_proj.weight"][2, 0] = poison

    path = rewritten(saved(tmp_path / "w.safetensors", SQUARE), spoil)
    fault = refused(loaded, path)
    assert fault.message == f"{path}: k_proj.weight has 2 NaN or Inf, the first at [1, 3]"
    assert (fault.hint, fault.code, fault.exit_code) == ("--allow-nonfinite continues anyway", "not-finite", 1)
    anyway = loaded(path, allow_nonfinite=True).attention.k_proj.weight
    assert (~anyway.isfinite()).nonzero().tolist() == [[1, 3], [2, 0]]


def test_weights_that_are_not_finite_are_never_written():
    layer = layer_of(SQUARE)
    layer.embedding[2, 5] = float("nan")
    fault = refused(to_bytes, layer, SQUARE.resolved(), WORDS)
    assert fault.message.startswith("the weights: embed.weight ")


def plain_file(path, config, change=lambda tensors: None):
    tensors = {name: t.clone() for name, t in tensors_of(layer_of(config)).items()}
    change(tensors)
    safetensors.torch.save_file(tensors, path)
    return str(path)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_file_without_metadata_loads_when_the_heads_are_given(dtype, tmp_path):
    config = Config(**{**vars(GROUPED), "dtype": dtype})
    path = plain_file(tmp_path / "plain.safetensors", config)
    source = read_layer_file(path, {"n_heads": 6})
    assert (source.config.n_kv_heads, source.config.d_head, source.config.d_v) == (2, 3, 5)
    assert (source.config.d_model, source.config.bias, source.config.out_proj) == (10, True, True)
    assert (source.config.dtype, source.metadata) == (dtype, None)
    assert (source.config.d_input, source.config.positions) == (10, "sinusoidal")
    found = tensors_of(from_file(source, allow_nonfinite=False))
    assert all(torch.equal(tensor, found[name]) for name, tensor in tensors_of(layer_of(config)).items())


def test_a_file_without_metadata_tells_the_width_of_its_input_and_its_table_of_positions(tmp_path):
    config = Config(**{**vars(GROUPED), "d_input": 4, **LEARNED})
    source = read_layer_file(plain_file(tmp_path / "plain.safetensors", config), {"n_heads": 6})
    assert (source.config.d_model, source.config.d_input) == (10, 4)
    assert (source.config.positions, source.config.max_positions) == ("learned", 6)
    found = tensors_of(from_file(source, allow_nonfinite=False))
    assert all(torch.equal(tensor, found[name]) for name, tensor in tensors_of(layer_of(config)).items())


def test_a_file_without_metadata_asks_for_the_heads(tmp_path):
    path = plain_file(tmp_path / "plain.safetensors", GROUPED)
    fault = refused(read_layer_file, path, {}, kind=UsageError)
    assert fault.message == f"{path} does not give the number of heads that its 18 query rows make"
    assert fault.hint == "add --heads N"


def test_everything_that_does_not_fit_is_listed_at_once(tmp_path):
    def damage(tensors):
        del tensors["v_proj.bias"]
        del tensors["o_proj.weight"]
        tensors["extra"] = torch.zeros(1)
        tensors["another"] = torch.zeros(2)
        tensors["k_proj.weight"] = torch.zeros(6, 9)
        tensors["q_proj.bias"] = torch.zeros(17)

    path = rewritten(saved(tmp_path / "w.safetensors", GROUPED), damage)
    fault = refused(read_layer_file, path, {})
    assert fault.message == (
        f"{path} does not have the tensors of its layer: v_proj.bias [10] is missing; o_proj.weight [10, 30] is missing; "
        "'another' is not expected; 'extra' is not expected; "
        "q_proj.bias is [17], not [18]; k_proj.weight is [6, 9], not [6, 10]"
    )
    assert (fault.code, fault.exit_code) == ("bad-file", 1)


def test_matrices_that_say_the_sizes_must_be_there(tmp_path):
    def damage(tensors):
        del tensors["embed.weight"]
        tensors["k_proj.weight"] = torch.zeros(6)

    path = plain_file(tmp_path / "plain.safetensors", Config(**{**vars(GROUPED), "bias": False}), damage)
    fault = refused(read_layer_file, path, {"n_heads": 6})
    assert fault.message == (
        f"{path} lacks the matrices embed.weight, k_proj.weight: "
        "it has 'k_proj.weight', 'o_proj.weight', 'q_proj.weight', 'v_proj.weight'"
    )


def test_the_file_of_a_whole_checkpoint_leads_to_the_option_that_takes_one(tmp_path):
    tensors = {f"encoder.layer.{n}.attention.self.query.weight": torch.zeros(2, 2) for n in range(10)}
    path = str(tmp_path / "model.safetensors")
    safetensors.torch.save_file({**tensors, "embeddings.position_ids": torch.arange(4)}, path)
    fault = refused(read_layer_file, path, {"n_heads": 2})
    assert fault.hint == "--model takes a whole checkpoint; mha weights convert takes one layer out of it"


def test_numbers_of_another_kind_are_refused(tmp_path):
    path = rewritten(
        saved(tmp_path / "w.safetensors", SQUARE),
        lambda tensors: tensors.update({"q_proj.bias": torch.zeros(6, dtype=torch.int32)}),
    )
    assert refused(read_layer_file, path, {}).message == (
        f"{path}: tensor 'q_proj.bias' has dtype I32, which is not one of F64, F32, BF16, F16"
    )


def test_an_option_that_contradicts_the_file_is_refused(tmp_path):
    path = saved(tmp_path / "w.safetensors", SQUARE)
    fault = refused(read_layer_file, path, {"n_heads": 2}, kind=UsageError)
    assert (fault.message, fault.hint) == (
        f"--heads 2 contradicts {path}, which has n_heads 3",
        "leave out --heads 2",
    )


def test_another_format_is_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    header = json.dumps({"format": "mha.weights/9"})
    safetensors.torch.save_file({"q": torch.zeros(1)}, path, metadata={"mha": header})
    message = refused(read_layer_file, str(path), {}).message
    assert message == f"{path} is not a weights file of format mha.weights/1: its format is 'mha.weights/9'"


def answers(layer, config):
    return weights.probe(layer, config.resolved())


def test_the_probe_is_the_layers_answer_in_float64():
    layer = layer_of(SQUARE)
    found = answers(layer, SQUARE)
    rows = layer.embedding.tolist()
    blend = [sum(math.sin(1 + i) * row[j] for i, row in enumerate(rows)) for j in range(len(rows[0]))]
    assert found.embed == pytest.approx(blend, rel=1e-8)
    rows = layer.embedding[3] + torch.sin(1.0 + torch.arange(6, 12, dtype=torch.float64))
    for name in "qkv":
        projection = getattr(layer.attention, f"{name}_proj")
        assert getattr(found, name) == pytest.approx(projection(rows).tolist(), rel=1e-8)
    half = LayerWeights(layer.embedding.half(), new_attention(SQUARE.resolved()).half())
    half.attention.load_state_dict(layer.attention.state_dict())
    assert answers(half, SQUARE).q == pytest.approx(found.q, abs=5e-3)


def test_the_output_of_the_probe_agrees_with_the_loops():
    config = Config(**{**vars(GROUPED), "scale": 1.5, "softcap": 2.0})
    layer = layer_of(config)
    waves = torch.sin(1.0 + torch.arange(30, dtype=torch.float64)).view(3, 10)
    expected = oracle.layer(
        (layer.embedding[[0, 3, 5]] + waves)[None].tolist(),
        {name: tensor.tolist() for name, tensor in layer.attention.state_dict().items()},
        n_heads=6, n_kv_heads=2, scale=1.5, softcap=2.0,
    )  # fmt: skip
    assert answers(layer, config).out == pytest.approx(expected.out[0, 2], rel=1e-8, abs=1e-9)


@pytest.mark.parametrize("positions", ["rope", "rope-interleaved", "alibi"])
def test_the_output_of_the_probe_reads_its_rows_at_the_first_places(positions):
    config = Config(**{**vars(GROUPED), "d_head": 4, "positions": positions, "rope_theta": 30.0})
    layer, places = layer_of(config), [[0, 1, 2]]
    waves = torch.sin(1.0 + torch.arange(30, dtype=torch.float64)).view(3, 10)
    expected = oracle.layer(
        (layer.embedding[[0, 3, 5]] + waves)[None].tolist(),
        {name: tensor.tolist() for name, tensor in layer.attention.state_dict().items()},
        n_heads=6, n_kv_heads=2, bias=oracle.distances(6, places, places) if positions == "alibi" else None,
        turn=None if positions == "alibi" else lambda heads: oracle.rotated(
            heads, places, theta=30.0, interleaved=positions == "rope-interleaved"
        ),
    )  # fmt: skip
    assert answers(layer, config).out == pytest.approx(expected.out[0, 2], rel=1e-8, abs=1e-9)


def test_the_probe_is_that_of_the_config_and_not_of_the_run():
    config = Config(**{**vars(GROUPED), "d_head": 4, "positions": "rope"})
    layer = layer_of(config)
    expected = answers(layer, config)
    layer.attention.positions, layer.attention.scale, layer.attention.softcap = "none", 3.0, 1.0
    assert answers(layer, config) == expected
    assert (layer.attention.positions, layer.attention.scale) == ("none", 3.0)
    assert answers(layer, Config(**{**vars(config), "positions": "none"})).out != expected.out


def test_the_probe_blends_the_table_of_positions():
    config = Config(**{**vars(GROUPED), **LEARNED})
    layer = layer_of(config)
    rows = layer.position_table.tolist()
    blend = [sum(math.sin(1 + i) * row[j] for i, row in enumerate(rows)) for j in range(10)]
    assert answers(layer, config).embed_positions == pytest.approx(blend, rel=1e-8, abs=1e-9)
    assert answers(layer_of(GROUPED), GROUPED).embed_positions == ()


def test_weights_of_a_tokenizer_file_load_with_that_file_again(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 1, "[U]": 2}, unk_token="[U]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    config = Config(tokenizer=str(tmp_path / "tokenizer.json"))
    encoded = encode(["the cat"], config.resolved())
    (tmp_path / "w.safetensors").write_bytes(weights_content(layer_request(encoded, config)))
    source = read_layer_file(str(tmp_path / "w.safetensors"), {})
    stored = as_stored(source.metadata.vocabulary)
    again = encode(["the cat"], source.config, vocabulary=stored, vocabulary_source="w.safetensors")
    assert again.sequences == encoded.sequences
    first, second = inspect(encoded, config), inspect(again, source=source)
    assert (first.arrays["pattern"] == second.arrays["pattern"]).all()


def test_weights_can_be_looked_at_with_another_scale_than_they_were_saved_with(tmp_path):
    path = saved(tmp_path / "w.safetensors", SQUARE)
    layer = from_file(read_layer_file(str(path), {"scale": 2.0}), allow_nonfinite=False)
    assert layer.attention.scale == 2.0


def test_loading_leaves_the_global_generator_alone(tmp_path):
    path = saved(tmp_path / "w.safetensors", SQUARE)
    before = torch.get_rng_state()
    from_file(read_layer_file(str(path), {}), allow_nonfinite=False)
    assert torch.equal(torch.get_rng_state(), before)
