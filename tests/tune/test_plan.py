"""The plan's file: what people may do to it, and what they are told. Candidates, which it names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

pytest.importorskip("transformers")
pytest.importorskip("cattrs")

from transformers import DynamicCache

import blocksparse as bs
from blocksparse.hosts.transformers import DensityRecorder, attach
from blocksparse.presets.named import UpTo
from blocksparse.presets.plan import Fingerprint, Part
from blocksparse.tools.tune import DEFAULT_CANDIDATES, Candidate, Plan, TuneError
from tests.hosts.small_models import small_model
from tests.machine import python
from tests.tune import tiny


def plan_for(model: Any) -> Plan:
    parts = (
        Part(0, None, None, 1.0, 0.0, 0.0, 1.0),
        Part(1, (0,), tiny.pooled(0.8, 32), 0.5, 0.01, 0.02, 0.5),
        Part(1, (1,), None, 1.0, 0.0, 0.0, 0.5),
        Part(2, None, Candidate("s2o", {"tau": 0.1, "S": 64, "block": 16}), 0.4, 0.01, 0.02, 0.5),
    )
    return Plan(Fingerprint.of(model), parts, tiny.evidence())


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.network()


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan_for(model).save(path)
    return path


def test_a_plan_comes_back_and_attends_as_it_says(model: Any, saved: Path) -> None:
    plan = Plan.load(saved)
    assert plan == plan_for(model)
    recorder = DensityRecorder()
    with attach(model, plan.schedule(model), min_tokens=1, min_queries=1, recorder=recorder):
        model(torch.arange(200)[None])
    assert recorder.sparse_calls() == {1: 1, 2: 1}
    density = recorder.density()
    assert bool((density[1, :2] < 1).all())
    assert bool((density[1, 2:] == 1).all())  # the second KV head is dense


@pytest.mark.parametrize("window", ["a_shape", "minference"])
def test_windows_hold_up_to_the_greatest_length_of_a_plan(
    model: Any, tmp_path: Path, window: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond it their layers are dense, and the log says so once; choices by mass go on."""
    few = {"vertical": 16, "slash": 24, "sink": 4, "recent": 16, "last_q": 16}
    arguments: dict[str, Any] = {"a_shape": {"local": 32}, "minference": few}[window]
    parts = (
        Part(0, None, Candidate(window, {**arguments, "block": 16}), 0.3, 0.0, 0.0, 1.0),
        Part(1, None, tiny.pooled(0.8, 32), 0.5, 0.0, 0.0, 1.0),
        Part(2, (0,), Candidate(window, {**arguments, "block": 16}), 0.3, 0.0, 0.0, 1.0),
        Part(2, (1,), None, 1.0, 0.0, 0.0, 1.0),
    )
    evolve(plan_for(model), layers=parts).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.longest == 256
    schedule = plan.schedule(model)
    assert caplog.messages == [
        "the plan was verified up to 256 tokens; in longer prompts its layers 0, 2, which keep a fixed number of "
        "tokens, attend densely: tune at the greatest length that you serve"
    ]
    for tokens, sparse in ((256, {0, 1, 2}), (257, {1})):
        recorder, ids = DensityRecorder(), torch.arange(tokens)[None] % tiny.VOCABULARY
        with torch.no_grad(), attach(model, schedule, min_tokens=1, recorder=recorder):
            held = model(ids).logits
        # A layer with a dense head is counted as sparse in any case.
        assert set(recorder.sparse_calls()) - {2} == sparse - {2}
        density = recorder.density()
        assert bool((density[2, :2] < 1).all()) == (2 in sparse)
        with (
            torch.no_grad(),
            attach(model, bs.Schedule(None, layers={1: tiny.pooled(0.8, 32).pipeline()}), min_tokens=1),
        ):
            assert torch.allclose(model(ids).logits, held, atol=1e-3) == (2 not in sparse)


def test_a_chunk_of_a_longer_prompt_is_dense_too(model: Any) -> None:
    """As far as the attachment is told how long the prompt is."""
    window = Candidate("a_shape", {"local": 32, "sink": 16, "block": 16}).pipeline()
    held = evolve(window, selector=UpTo(window.selector, 256))
    for tokens, rest in ((256, window), (257, None)):
        ids, told = torch.arange(tokens)[None] % tiny.VOCABULARY, list[Any]()
        for pipeline in (held, rest):
            with attach(model, bs.Schedule(pipeline), min_tokens=1, min_queries=1) as attachment:
                cache = DynamicCache(config=model.config)
                with torch.no_grad(), attachment.prompt(tokens):
                    told.append([model(part, past_key_values=cache).logits for part in ids.split(80, dim=1)])
        for one, other in zip(*told, strict=True):
            torch.testing.assert_close(one, other)


def test_which_candidates_have_a_fixed_budget() -> None:
    fixed = {candidate.preset for candidate in DEFAULT_CANDIDATES if candidate.fixed_budget}
    assert fixed == {"a_shape"}
    for fixes, candidate in (
        (True, Candidate("tri_shape")),
        (True, Candidate("minference", last=128)),
        (False, Candidate("s2o")),
        (False, Candidate("auto", last=128)),
        (False, Candidate("flash_prefill")),
    ):
        assert candidate.fixed_budget == fixes


def test_the_file_is_for_people(saved: Path) -> None:
    layers = json.loads(saved.read_text())["layers"]
    assert layers[1]["attention"] == {
        "preset": "mean_pooling", "arguments": {"mass": 0.8, "block": 16}, "band": 32, "pv_skip": None,
        "last": None,
    }  # fmt: skip


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def put(*where: Any, value: Any) -> Callable[[dict[str, Any]], Any]:
    def edit(content: Any) -> None:
        for key in where[:-1]:
            content = content[key]
        content[where[-1]] = value

    return edit


EDITS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (put("layers", 3, "layer", value=3), "for a model of 3 layers, 0 to 2, but has no layer 2"),
    (lambda x: x["layers"].append({**x["layers"][0], "layer": 3}), "of 3 layers, 0 to 2, but has a layer 3"),
    (lambda x: x["layers"].append(x["layers"][0]), "layer 0 of the plan must name each of 2 KV heads once"),
    (put("layers", 2, "heads", value=[]), "a part of layer 1 of the plan names no KV heads"),
    (put("model", "layers", value=10**10), "from 1 to 10000 layers and KV heads, and the plan names 10000000000"),
    (put("model", "kv_heads", value=0), "from 1 to 10000 layers and KV heads, and the plan names 3 and 0"),
    (put("layers", 2, "heads", value=[0]), "layer 1 of the plan must name each of 2 KV heads once"),
    (put("layers", 1, "attention", "preset", value="pbs"), "there is no preset 'pbs'. There are auto, pbs_attn, "),
    (put("layers", 1, "attention", "preset", value="__import__"), "there is no preset '__import__'"),
    (put("layers", 1, "attention", "arguments", "mass", value=2), "'mass' must be"),
    (put("layers", 1, "attention", "arguments", "mass", value="0.8"), "cannot be made: 'mass' must"),
    (put("layers", 1, "attention", "arguments", "mass", value={}), "argument 'mass' of mean_pooling must be"),
    (put("layers", 1, "attention", "arguments", value={"tau": 1}), "unexpected keyword argument 'tau'"),
    (put("layers", 3, "attention", "band", value=64), "s2o.* cannot be made"),
    (put("layers", 1, "attention", "band", value="64"), "is not a whole plan: .*'64'"),
    (put("evidence", "plan", "lengths", value=[]), "the plan names no length at which it was verified"),
    (put("layers", 0, "density", value="1"), "is not a whole plan: .*'1' is not of type float"),
    (put("layers", 0, "more", value=1), "is not a whole plan: .*more"),
    (lambda x: x.pop("evidence"), "is not a whole plan: .*evidence"),
    (put("layers", value=None), "is not a whole plan"),
    (put("layers", 1, "text_kl", value=float("nan")), "'text_kl' must be a finite number, at least 0, or None"),
    (put("layers", 0, "ms", value=float("inf")), "'ms' must be a finite number, at least 0: inf"),
    (put("layers", 1, "density", value=1.5), "'density' must be a number from 0 to 1: 1.5"),
    (put("evidence", "plan", "lengths", 0, "answer_kl", value=-0.1), "'answer_kl' must be a finite number, at"),
    (put("evidence", "plan", "lengths", 0, "density", value=float("nan")), "'density' must be a number from 0 to"),
    (put("evidence", "plan", "lengths", 0, "found", value=-1), "'found' must be a whole number, at least 0: -1"),
    (put("evidence", "tries", 0, "ms", value=-2), "'ms' must be a finite number, at least 0: -2.0"),
    (put("evidence", "dense_ms", value=float("nan")), "'dense_ms' must be a finite number, at least 0: nan"),
    (put("evidence", "noise_text_kl", value=-1e-3), "'noise_text_kl' must be a finite number, at least 0: -0.001"),
    (put("evidence", "text_kl_budget", value=float("inf")), "'text_kl_budget' must be a finite number above 0"),
    (put("evidence", "tokens", 0, value=0), "'tokens' must be a whole number, at least 1: 0"),
    (put("evidence", "plan", "lengths", 0, "tokens", value=-5), "'tokens' must be a whole number, at least 1: -5"),
    (put("evidence", "batch", value=0), "'batch' must be a whole number, at least 1: 0"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "sentence"), EDITS)
def test_an_edited_plan_is_refused_and_says_what_is_wrong(saved: Path, edit: Any, sentence: str) -> None:
    change(saved, edit)
    before = saved.read_bytes()
    if "has no" not in sentence or edit is EDITS[0][0]:
        with pytest.raises(TuneError, match="was edited after it was made"):
            Plan.load(saved)
    with pytest.raises(TuneError, match=sentence) as refused:
        Plan.load(saved, edited=True)
    assert str(saved) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert saved.read_bytes() == before


def test_an_edited_plan_may_be_taken_all_the_same(saved: Path) -> None:
    change(saved, put("layers", 1, "attention", "band", value=64))
    assert Plan.load(saved, edited=True).layers[1].attention == tiny.pooled(0.8, 64)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("no json", "the plan cannot be read"),
        ("[" * 200_000, "the plan cannot be read"),
        ("[1, 2]", "is not a plan of blocksparse"),
        ('{"layers": []}', "is not a plan of blocksparse"),
        (
            '{"format": "blocksparse plan 9"}',
            "is a 'blocksparse plan 9', and this version reads 'blocksparse plan 2'",
        ),
        (None, "the plan cannot be read"),
    ],
)
def test_wrong_files(tmp_path: Path, content: str | None, sentence: str) -> None:
    path = tmp_path / "wrong.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TuneError, match=sentence):
        Plan.load(path)


def test_a_plan_for_another_model(model: Any, saved: Path) -> None:
    plan = Plan.load(saved)
    rotary = {"rope_type": "default", "rope_theta": 5e5}
    others: list[dict[str, Any]] = [{"seed": 1}, {"rope_parameters": rotary}, {"hidden_act": "gelu"}]
    for other in others:  # in weights, or in settings alone
        with pytest.raises(TuneError, match=r"made for another model, .*\(it differs in weights or settings\)"):
            plan.schedule(tiny.network(**other))
    with pytest.raises(TuneError, match=r"\(it differs in layers: 3 and 4\)"):
        plan.schedule(tiny.network(num_hidden_layers=4))
    with pytest.raises(TuneError, match=r"embed_tokens.weight is on the meta device, offloaded"):
        plan.schedule(tiny.network().to("meta"))
    assert plan.schedule(model.to(torch.float64)).resolve(3)[0] is None  # the same numbers in another dtype
    model.to(torch.float32)


@pytest.mark.parametrize("head", range(tiny.HEADS))
def test_a_plan_for_a_model_without_one_head(saved: Path, head: int) -> None:
    """Rows of a multiple of 32 numbers, of which one head has a part."""
    ablated = tiny.network()
    weight = ablated.model.layers[1].self_attn.o_proj.weight
    size = weight.shape[1] // tiny.HEADS
    weight[:, head * size : (head + 1) * size] = 0
    with pytest.raises(TuneError, match=r"\(it differs in weights or settings\)"):
        Plan.load(saved).schedule(ablated)


def test_a_plan_knows_each_of_many_heads() -> None:
    """In rows and in columns, also of a weight that is packed into one column."""
    network, heads, size = tiny.network(), 128, 4
    weight = torch.nn.Parameter(torch.ones(heads * size, heads * size), requires_grad=False)
    attention = network.model.layers[1].self_attn
    for shape in ((heads * size, heads * size), (-1, 1)):
        attention.o_proj.weight = torch.nn.Parameter(weight.data.view(shape), requires_grad=False)
        whole, state = Fingerprint.of(network), torch.get_rng_state()
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            for one in (weight[part], weight[:, part]):
                one.zero_()
                assert Fingerprint.of(network) != whole
                one.fill_(1)
        with torch.device("meta"):  # of new tensors, as a default device
            assert Fingerprint.of(network) == whole
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("kind", "scale"),
    [
        ("granite", "attention_multiplier"),
        ("gemma2", "query_pre_attn_scalar"),
        ("gemma2", "attn_logit_softcapping"),
        ("gpt2", "scale_attn_by_inverse_layer_idx"),
        ("mixtral", "num_experts_per_tok"),
        ("granite", "residual_multiplier"),
    ],
)
def test_a_plan_knows_the_numbers_of_a_config(kind: str, scale: str) -> None:
    network = small_model(kind)
    made_for = Fingerprint.of(network)
    network.config.use_cache, network.config.pad_token_id = False, 3  # of a run
    assert made_for.difference(Fingerprint.of(network.to(torch.float64))) is None
    setattr(network.config, scale, type(getattr(network.config, scale))(7))
    assert made_for.difference(Fingerprint.of(network)) == "weights or settings"


class Quantised(torch.nn.Module):
    """A linear layer whose weight is a buffer, as in GPTQ and AWQ."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("qweight", (100 * weight).round().to(torch.int8))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


class Adapted(torch.nn.Module):
    """What layers of PEFT say of their adapters."""

    merged_adapters: tuple[str, ...] = ()
    disable_adapters = False

    def __init__(self) -> None:
        super().__init__()
        self.active_adapters, self.scaling = ["a"], {"a": 1.0, "b": 1.0}


def test_a_plan_knows_what_quantised_layers_hold() -> None:
    network = tiny.network()
    attention = network.model.layers[1].self_attn
    attention.q_proj = Quantised(attention.q_proj.weight)
    made_for = Fingerprint.of(network)
    attention.q_proj.scratch += 1  # of a run
    assert made_for.difference(Fingerprint.of(network)) is None
    attention.q_proj.qweight += 1
    assert made_for.difference(Fingerprint.of(network)) == "weights or settings"


def test_a_plan_knows_the_parts_of_a_weight_of_several_tensors() -> None:
    network = tiny.network()
    attention = network.model.layers[1].self_attn
    prints = []
    for scale in (1.0, 2.0):
        weight = TwoTensor(attention.k_proj.weight.data, scale * attention.v_proj.weight.data)
        attention.q_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
        prints.append(Fingerprint.of(network))
    assert prints[0].difference(prints[1]) == "weights or settings"
    assert prints[0].difference(prints[0]) is None


def test_a_plan_knows_which_adapters_of_peft_are_active() -> None:
    network = tiny.network()
    network.adapted = adapted = Adapted()
    made_for = Fingerprint.of(network)
    for name, value in (("active_adapters", ["b"]), ("disable_adapters", True), ("scaling", {"a": 0.5, "b": 1.0})):
        before = getattr(adapted, name)
        setattr(adapted, name, value)
        assert made_for.difference(Fingerprint.of(network)) == "weights or settings"
        setattr(adapted, name, before)
    adapted.scaling["b"] = 0.5  # of no adapter that adds anything
    assert made_for.difference(Fingerprint.of(network)) is None


def test_a_plan_for_a_model_over_ranks(model: Any, saved: Path, tmp_path: Path) -> None:
    """Tensor parallelism makes a DTensor of each weight."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh, sharded = init_device_mesh("cpu", (1,)), tiny.network()
        for module in sharded.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                shards = distribute_tensor(weight, mesh, [Shard(0)])
                module.register_parameter(name, torch.nn.Parameter(shards, requires_grad=False))
        plan = Plan.load(saved)
        assert plan.schedule(sharded) == plan.schedule(model)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("candidate", DEFAULT_CANDIDATES, ids=str)
def test_candidates_are_written_as_python(candidate: Candidate) -> None:
    written, _, rules = str(candidate).partition(" | ")
    made = eval(written, dict(vars(bs)))
    if rules:
        made = made | eval(rules, dict(vars(bs)))
    if isinstance(made.executor, bs.AutoExecutor):
        made = evolve(made, executor=bs.AutoExecutor(dense_below=0))
    assert repr(candidate.pipeline()) == repr(made)


@pytest.mark.slow
def test_the_package_needs_no_extra_until_it_tunes() -> None:
    """The command line may hook the command in, and say what is missing, where the extra is not installed."""
    code = (
        "import sys; extra = 'transformers', 'scipy', 'cattrs', 'rich'; sys.modules.update(dict.fromkeys(extra));"
        "from blocksparse.tools.cli.main import main;"
        "from blocksparse.tools.tune import Plan;"
        "sys.exit(main(['tune', 'model']))"
    )
    result = python(code)
    assert result.returncode == 1
    assert result.stderr.startswith("blocksparse tune: transformers")
    assert "is not installed: pip install -e '.[tune]' in a checkout" in result.stderr
    assert result.stderr.count("\n") == 1
