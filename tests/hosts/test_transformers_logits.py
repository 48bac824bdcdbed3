"""Layers with a softcap or attention sinks: sparse or exactly dense, against the model's own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from attrs import evolve
from tests.hosts.test_transformers import (
    DENSE_LIMIT,
    LAYERS,
    SPARSE,
    all_dense,
    all_sparse,
    assert_same_logits,
    attached,
    make,
    tokens,
)
from tests.machine import needs_gpu

from blocksparse import AutoExecutor, CpuExecutor, Everything, GatherExecutor, Ranked, TritonExecutor
from blocksparse.check.per_head import read, read_changed_again
from blocksparse.hosts.transformers import DensityRecorder
from blocksparse.hosts.transformers.prompt_mask import PromptMask
from blocksparse.layers.head_groups import HeadGroups
from blocksparse.layers.schedule import LayerPipeline, Schedule
from blocksparse.observe import Audit

each_model = pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
CPU: Any = CpuExecutor()


def with_sinks(name: str) -> Any:
    """The model, with sinks that take much of the weight, unlike for each head."""
    model = make(name)
    for layer in model.model.layers if name == "gpt_oss" else ():
        layer.self_attn.sinks.copy_(torch.tensor([-1.0, 0.5, 2.0, 4.0]))
    return model


@each_model
@pytest.mark.parametrize("length", [65, 129])
@pytest.mark.parametrize("executor", [DENSE_LIMIT.executor, CPU, AutoExecutor()], ids=lambda x: type(x).__name__)
def test_the_pipeline_attends_with_them(executor: Any, length: int, name: str) -> None:
    """One layer of the two has a window, too."""
    recorder, ids = DensityRecorder(), tokens(length, batch=2)
    pipeline = evolve(DENSE_LIMIT, executor=executor)
    assert_same_logits(with_sinks(name), lambda model: model(ids).logits, recorder, pipeline)
    if isinstance(executor, AutoExecutor):
        assert all_dense(recorder, "every block is kept")
    else:
        assert all_sparse(recorder)


@each_model
def test_the_portable_kernel_attends_with_them(name: str, device: str) -> None:
    recorder, ids = DensityRecorder(), tokens(70).to(device)
    model, executor = with_sinks(name).to(device), TritonExecutor()
    pipeline: Any = evolve(DENSE_LIMIT, executor=executor)
    assert_same_logits(model, lambda model: model(ids).logits, recorder, pipeline)
    assert all_sparse(recorder)


@needs_gpu
@each_model
@pytest.mark.parametrize("dense", [False, True])
def test_long_prompts_on_a_gpu(dense: bool, name: str) -> None:
    """Whole and in chunks; dense layers take the kernel too."""
    model, ids = with_sinks(name).cuda(), tokens(500, batch=2).cuda()
    pipeline: Any = evolve(DENSE_LIMIT, executor=TritonExecutor())
    expected = model(ids).logits
    recorder = DensityRecorder()
    with attached(model, recorder, Schedule(None if dense else pipeline)):
        torch.testing.assert_close(model(ids).logits, expected, atol=2e-4 * float(expected.abs().max()), rtol=0)
    assert all_dense(recorder, "no pipeline for this layer") if dense else all_sparse(recorder)


@each_model
def test_sparse_layers_attend_to_less_with_them(name: str) -> None:
    """By two executors, which mean the same; and what they give is not what the layers without would."""
    model, ids = with_sinks(name), tokens(200, batch=2)
    outputs = []
    for executor in (SPARSE.executor, CPU):
        recorder = DensityRecorder()
        with attached(model, recorder, evolve(SPARSE, executor=executor)):
            outputs.append(model(ids).logits)
        assert all_sparse(recorder)
        assert float(recorder.density().mean()) < 0.8
    torch.testing.assert_close(*outputs, atol=1e-4 * float(outputs[0].abs().max()), rtol=0)
    assert not torch.allclose(outputs[0], model(ids).logits, atol=1e-2)


@each_model
def test_dense_with_a_reason_where_nothing_else_works(name: str) -> None:
    model, ids = with_sinks(name), tokens(100, batch=2)
    ranked = evolve(DENSE_LIMIT, selector=Ranked(Everything()), executor=GatherExecutor(0.0))
    unknown = "it knows no softcap and no attention sinks"  # one of the layers has a window beside them
    cases: list[tuple[LayerPipeline | Schedule, dict[str, Any], str]] = [
        (Schedule(None), {}, "no pipeline for this layer"),
        (DENSE_LIMIT, {"min_tokens": 101}, "fewer than min_tokens"),
        (DENSE_LIMIT, {"min_queries": 101}, "fewer than min_queries"),
        (ranked, {}, unknown),
    ]
    for pipeline, given, reason in cases:
        recorder = DensityRecorder()
        assert_same_logits(model, lambda model: model(ids).logits, recorder, pipeline, **given)
        assert recorder.sparse_calls() == {}
        for calls in recorder.dense_calls().values():
            (why,) = calls
            assert why.endswith(reason)


@each_model
def test_in_groups_of_heads_and_under_audits(name: str) -> None:
    model, ids = with_sinks(name), tokens(100, batch=2)
    expected = model(ids).logits
    assert_same_in_groups_and_audited(model, ids, {(1,): None, (0,): evolve(DENSE_LIMIT, executor=CPU)})
    sparse = evolve(SPARSE, executor=CPU)
    falls_back = Audit(rows=50, every=1, max_error=1e-6, fall_back=True)
    with attached(model, None, sparse, audit=falls_back):
        for _ in range(2):
            model(ids)
            falls_back.layers()
        actual = model(ids).logits
    torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


def assert_same_in_groups_and_audited(model: Any, ids: Tensor, groups: dict[tuple[int, ...], Any]) -> None:
    """Under an audit of each call, which finds that nothing is lost, and with these groups of heads."""
    audit = Audit(rows=50, every=1)
    assert_same_logits(model, lambda model: model(ids).logits, None, DENSE_LIMIT, audit=audit)
    assert_same_logits(model, lambda model: model(ids).logits, None, HeadGroups(groups))
    assert len(audit.layers()) == LAYERS
    for layer in audit.layers():
        assert layer.covered_mass is not None
        assert abs(layer.covered_mass.value - 1) < 1e-5


def _write(sinks: Tensor) -> None:
    sinks.mul_(-2)


def _nothing(sinks: Tensor) -> None:
    sinks.fill_(-float("inf"))


def _write_data(sinks: Tensor) -> None:
    sinks.data.mul_(-2)


def _other_data(sinks: Tensor) -> None:
    sinks.data = -2 * sinks.data


def _write_unseen(sinks: Tensor) -> None:
    sinks.detach().numpy()[:] = [3, -1, 2, 0]


@pytest.mark.parametrize("change", [_write, _nothing, _write_data, _other_data, _write_unseen])
def test_sinks_that_change_are_read_again(change: Callable[[Tensor], None]) -> None:
    model, ids = with_sinks("gpt_oss"), tokens(100)
    with attached(model, recorder := DensityRecorder()) as attachment:
        before = model(ids).logits
        for layer in model.model.layers:
            change(layer.self_attn.sinks)
        after = model(ids).logits
        attachment.detach()
        expected = model(ids).logits
    assert recorder.sparse_calls() == {0: 2, 1: 2}
    torch.testing.assert_close(after, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)
    assert not torch.allclose(before, after, atol=1e-2)


@pytest.mark.parametrize("change", [_write_data, _write_unseen])
def test_attaching_again_reads_sinks_again(change: Callable[[Tensor], None]) -> None:
    """Those on a GPU are remembered, and no version tells of such a write."""
    model = with_sinks("gpt_oss")
    sinks = model.model.layers[0].self_attn.sinks
    before = read(sinks).numbers
    change(sinks)
    assert read(sinks).numbers == before != tuple(sinks.tolist())
    with attached(model, DensityRecorder()):
        assert read(sinks).numbers == tuple(sinks.tolist())


@pytest.mark.parametrize("change", [_write_data, _write_unseen])
def test_sinks_of_a_served_model_are_read_again_if_they_change(change: Callable[[Tensor], None]) -> None:
    """A server loads new weights into the same memory, and has nothing to attach again."""
    changed, same = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([1.0, 4.0])
    never_read = torch.ones(3)
    before = read(changed), read(same)
    change(changed)
    read_changed_again([changed, same, never_read])
    assert read(changed).numbers == tuple(changed.tolist()) != before[0].numbers
    assert read(same) is before[1]


def test_tensors_of_inference_mode_are_read_in_each_call() -> None:
    """No version tells of any write to one."""
    with torch.inference_mode():
        sinks = torch.tensor([0.5, -1.0])
        before = read(sinks)
        sinks.mul_(2)
        assert (before.numbers, read(sinks).numbers) == ((0.5, -1.0), (1.0, -2.0))


def test_what_cannot_be_read_is_left_to_the_model() -> None:
    model, (q, k, v) = make("gemma2"), (torch.randn(1, n, 50, 8) for n in (4, 2, 2))
    recorder = DensityRecorder()
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"softcap": torch.tensor(3.0)}, "softcap"),
        ({"s_aux": torch.zeros(2)}, "attention sinks"),
    )
    mask = PromptMask((1, 1, 50, 50), 50, q.device)  # of a causal prompt
    with attached(model, recorder) as attachment:
        attend = attachment_of(attachment.key)
        for given, reason in cases:
            attend(model.model.layers[0].self_attn, q, k, v, mask, scaling=0.3, **given)
            assert recorder.dense_calls()[0][reason] == 1


def attachment_of(key: str) -> Any:
    from transformers import AttentionInterface

    return AttentionInterface._global_mapping[key]


def test_gradients_of_sinks_are_dense() -> None:
    model, recorder, ids = with_sinks("gpt_oss"), DensityRecorder(), tokens(60)
    model.requires_grad_(False)
    sinks = [layer.self_attn.sinks.requires_grad_() for layer in model.model.layers]
    with torch.enable_grad():
        expected = torch.autograd.grad(model(ids).logits.square().mean(), sinks)
        with attached(model, recorder):
            actual = torch.autograd.grad(model(ids).logits.square().mean(), sinks)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
    assert all_dense(recorder, "gradients")


@pytest.mark.slow
@each_model
def test_compiled_models_are_dense_there(name: str) -> None:
    model, ids = with_sinks(name), tokens(60)
    expected = model(ids, use_cache=False).logits
    torch.compiler.reset()
    with attached(model, recorder := DensityRecorder()):
        compiled: Any = torch.compile(model, backend="eager")
        actual = compiled(ids, use_cache=False).logits
    torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)
    assert recorder.sparse_calls() == {}
    torch.compiler.reset()
