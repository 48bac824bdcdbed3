"""What transformers is asked to make as a mask, and models that make their own."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import eager_mask, sdpa_mask

from blocksparse.batch.sequences import Sequences
from blocksparse.hosts.transformers.own_function import ASKS, forwards_of
from blocksparse.hosts.transformers.prompt_mask import PromptMask, padded_behind

_ROWS = 256  # queries of a mask that are looked at together


def mask_of(numbers: torch.dtype | None = None, **request: Any) -> Tensor | PromptMask | None:
    """The mask that sdpa would get, or None where sdpa would get none and every query sees every key.

    With `numbers`, a model's own code gets the mask that eager attention would get.

    The mask is made later, if at all. While a graph is traced, and for a mask that is not a function of indices,
    it is made at once. A whole causal prompt has a mask too, which costs nothing. Without a mask, transformers'
    sdpa reads the module's `is_causal`, which is False in modules that are causal by their mask alone.
    """
    if isinstance(given := request.get("attention_mask"), PromptMask):
        return given  # `generate` got it from this function
    B, M, N = request["batch_size"], request["q_length"], request["kv_length"]
    if (found := _seen(**request)) is not None:
        seen, window = found
        sequences = None
        if request.get("attention_mask") is not None or not request.get("allow_is_causal_skip", True):
            sequences = _sequences(seen, window, **request)
            if sequences is None:
                return _later(request, numbers)
            if all(span.queries == M and span.keys == seen for span in sequences.spans):
                sequences = None
        if window is not None and sequences is not None and not _hides(window, sequences):
            window = None
        dropped = int(request.get("kv_offset", 0))
        return PromptMask(
            (B, 1, M, N), seen, request["device"], sequences, window=window, dropped=dropped, numbers=numbers
        )
    return _later(request, numbers)


def _hides(window: int, sequences: Sequences) -> bool:
    """Whether a window hides a key of its prompt from a query, or from padding behind the prompt."""
    reach = (sequences.keys - span.first_key for span in padded_behind(sequences))
    return max((*(span.keys for span in sequences.spans), *reach), default=0) > window


def _later(request: dict[str, Any], numbers: torch.dtype | None) -> Tensor | PromptMask | None:
    """A mask that nothing is known about. `None` of sdpa means that every key is seen."""
    B, M, N = request["batch_size"], request["q_length"], request["kv_length"]
    if (
        M == 1
        or torch.compiler.is_compiling()
        or request.get("use_vmap")
        or request.get("allow_is_bidirectional_skip")
    ):
        mask: Tensor | None = sdpa_mask(**request) if numbers is None else eager_mask(**request)
        return mask
    # A static cache gives its count of tokens itself, to which the first layer adds before any layer attends.
    kept = {name: x.clone() if isinstance(x, Tensor) else x for name, x in request.items()}
    return PromptMask((B, 1, M, N), N, request["device"], request=kept, numbers=numbers)


def _seen(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    mask_function: Callable[..., Tensor] | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> tuple[int, int | None] | None:
    """The keys up to that of the last query and its window, None if it hides nothing; None for other requests.

    Other requests are those that cannot be for causal prompts. Padding is a request for causal prompts, and so are
    packed prompts: for these, and for masks that are combined with others, `allow_is_causal_skip` is False.
    """
    if q_length == 1 or use_vmap or allow_is_bidirectional_skip:
        return None
    if torch.compiler.is_compiling() and (
        attention_mask is not None or isinstance(q_offset, Tensor) or not allow_is_causal_skip
    ):
        return None  # reading a tensor would break the graph
    seen = int(q_offset) + q_length - int(kv_offset)
    if not q_length <= seen <= kv_length:
        return None
    if local_size is None or seen <= local_size:
        return (seen, None) if int(kv_offset) == 0 else None
    if torch.compiler.is_compiling() or mask_function is None:
        return None
    if allow_is_causal_skip and not _is_window(mask_function, local_size, int(q_offset) + q_length - 1):
        return None  # chunks of so many tokens, of which each sees itself alone, come with a size too
    return seen, local_size


def _is_window(mask_function: Callable[..., Tensor], size: int, last: int) -> bool:
    """Whether a mask function without padding is that of causal queries which see `size` keys at most.

    transformers does not report it. So the function is asked for pairs at both ends of two windows: the first one
    that hides a key, and that of the `last` position. It gets numbers on the CPU, so no GPU is waited for.
    """
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    return all(
        bool(mask_function(zero, zero, zero + query, zero + key)) == (query - size < key <= query)
        for query in (size, last)
        for key in (query - size, query - size + 1, query, query + 1)
        if key <= last
    )


def _sequences(
    seen: int,
    window: int | None,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor] | None = None,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Sequences | None:
    """The prompts of a padded batch, or those of which a mask is made, if it is made of causal prompts."""
    if allow_is_causal_skip:
        assert attention_mask is not None
        if attention_mask.shape[0] != batch_size or attention_mask.shape[1] < int(kv_offset) + seen:
            return None
        try:
            real = attention_mask[:, int(kv_offset) : int(kv_offset) + seen]
            return Sequences.padded(real, queries=q_length)
        except ValueError:  # padding inside of a prompt
            return None
    if mask_function is None or attention_mask is not None or not seen == q_length == kv_length:
        return None
    return _packed(mask_function, window, batch_size, kv_length, device)


def _packed(
    mask_function: Callable[..., Tensor], window: int | None, batch: int, tokens: int, device: torch.device | str
) -> Sequences | None:
    """The prompts that stand behind one another in every entry of the batch, if the mask lets them see just that.

    transformers does not say so; it gives a function of indices. Where a query does not see the key before it, a
    prompt begins; and then every pair is compared, a few rows at a time. The host waits once.
    """
    entry = torch.arange(batch, device=device)[:, None, None, None]
    head = torch.zeros(1, dtype=torch.int64, device=device)[:, None, None, None]
    token = torch.arange(tokens, device=device)

    def sees(query: Tensor, key: Tensor) -> Tensor:
        return mask_function(entry, head, query, key)

    begins = ~sees(token[1:, None], token[:-1, None]).expand(batch, 1, -1, 1)[:, 0, :, 0]  # [B, N - 1]
    number = torch.nn.functional.pad(begins.cumsum(1), (1, 0))[:, None]  # [B, 1, N]
    same = torch.ones((), dtype=torch.bool, device=device)
    for rows in token.split(_ROWS):
        query = rows[:, None]
        expected = (number[..., rows, None] == number[..., None, :]) & (token <= query)
        if window is not None:
            expected &= token > query - window
        same &= (sees(query, token) == expected).all()
    *flags, known = torch.cat((begins.flatten(), same[None])).tolist()
    if not known:
        return None
    spans = []
    for row in range(batch):
        begin = 0
        for end in range(1, tokens + 1):
            if end == tokens or flags[row * (tokens - 1) + end - 1]:
                spans.append((row, begin, end - begin, begin, end - begin))
                begin = end
    return Sequences(spans, batch=batch, queries=tokens, keys=tokens)


_VIEWS = {"unsqueeze", "transpose", "view", "expand", "permute", "reshape", "squeeze"}


def asks_for_its_function(module: type[nn.Module]) -> bool:
    """Whether a module calls the function that transformers has under the name in its config.

    What a class says of itself (`_supports_attention_backend`) is missing in many models that do. So this looks at
    which names the forward of the module uses.
    """
    return any(ASKS in forward.__code__.co_names for forward in forwards_of(module))


def attends_several_times(module: type[nn.Module]) -> bool:
    """Whether the forward of a module may call the function that it asks for several times (DiffLlama)."""
    for forward in forwards_of(module):
        body = _parsed(forward)
        asked = {
            ast.unparse(x.target if isinstance(x, ast.AnnAssign) else x.targets[0])
            for function in body
            for x in ast.walk(function)
            if isinstance(x, ast.Assign | ast.AnnAssign) and x.value is not None and ASKS in ast.unparse(x.value)
        }
        if any(_calls(function.body, asked) > 1 for function in body):
            return True
    return False


def _calls(steps: Sequence[ast.AST], of: set[str]) -> int:
    """How often steps call one of these at most: a loop twice, and of the branches of an `if` one."""
    times = 0
    for i, step in enumerate(steps):
        if isinstance(step, ast.If):
            then, otherwise = _calls(step.body, of), _calls(step.orelse, of)
            if isinstance(step.body[-1], ast.Return):
                return times + max(then, otherwise + _calls(steps[i + 1 :], of))
            times += max(then, otherwise)
        else:
            loops = isinstance(step, ast.For | ast.While | ast.ListComp | ast.GeneratorExp)
            is_call = isinstance(step, ast.Call) and ast.unparse(step.func) in of
            times += is_call + (1 + loops) * _calls(list(ast.iter_child_nodes(step)), of)
    return times


def uses_own_masks(module: type[nn.Module]) -> str | None:
    """The name of the class that does arithmetic on a mask, or None: `module`, or one that it may turn into.

    A module that asks transformers for its function leaves the mask to that function, unless it adds columns of
    numbers to the mask. BigBirdPegasus changes the class of its attention in a call, so the classes that other
    methods than `__init__` name count too.
    """
    named = (
        method.__globals__.get(name)
        for method in _methods(module)
        if method.__name__ != "__init__"
        for name in method.__code__.co_names
    )
    for part in (module, *named):
        if not (isinstance(part, type) and issubclass(part, nn.Module)):
            continue
        rule = widens if asks_for_its_function(part) else reads_as_numbers
        if part.__module__ == module.__module__ and any(_does(rule, x) for x in _methods(part)):
            return part.__name__
    return None


def widens(function: ast.FunctionDef) -> bool:
    """Whether a function appends to a mask that it is given, as for keys that a model adds."""
    joined = (
        x.args[0] for x in ast.walk(function) if isinstance(x, ast.Call) and ast.unparse(x.func) == "torch.cat"
    )
    parts = (part for each in joined if isinstance(each, ast.List | ast.Tuple) for part in each.elts)
    return not _masks(function).isdisjoint(map(_viewed, parts))


def reads_as_numbers(function: ast.FunctionDef) -> bool:
    """Whether a function adds a mask that it is given, or takes a row of it, and never asks for bools."""
    masks, nodes = _masks(function), list(ast.walk(function))
    if not masks or any(isinstance(x, ast.Attribute) and ast.unparse(x) == "torch.bool" for x in nodes):
        return False
    named = [x for x in nodes if isinstance(x, ast.Assign) and isinstance(x.targets[0], ast.Name)]
    for view in sorted(named, key=lambda x: x.lineno):
        if _is_one_of(masks, view.value):  # a part of a mask under a name of its own
            masks.add(ast.unparse(view.targets[0]))
    made = {  # a name and the line from which on it is another mask, which the function makes itself
        (target.id, node.lineno)
        for node in nodes
        if isinstance(node, ast.Assign) and not _is_one_of(masks, node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Add):
            parts = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
            for name in masks.intersection(map(_viewed, parts)):
                if not any(name == other and line <= node.lineno for other, line in made):
                    return True
        if isinstance(node, ast.Subscript) and _viewed(node) in masks and _is_row(node.slice):
            return True
    return False


def _masks(function: ast.FunctionDef) -> set[str]:
    return {x.arg for x in (*function.args.args, *function.args.kwonlyargs) if x.arg.endswith("mask")}


def _is_one_of(masks: set[str], value: ast.expr) -> bool:
    choices = (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
    return any(_viewed(x) in masks for x in choices)


def _is_row(index: ast.expr) -> bool:
    """Whether an index takes the row of one query from a mask `[B, H, M, N]`."""
    if not isinstance(index, ast.Tuple) or len(index.elts) != 4:
        return False
    batch, heads, query, keys = index.elts
    return all(isinstance(x, ast.Slice) for x in (batch, heads, keys)) and not isinstance(query, ast.Slice)


def _viewed(node: ast.expr) -> str:
    """The name of the tensor of which an expression is a part or a view, or nothing."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS:
            node = node.func.value
        else:
            return ""
    return node.id


def _methods(module: type[nn.Module]) -> Iterator[FunctionType]:
    """The functions of a class and its bases, as far as they are not PyTorch's."""
    for owner in module.__mro__:
        if issubclass(owner, nn.Module) and not owner.__module__.startswith("torch."):
            given = (inspect.unwrap(x) for x in vars(owner).values() if callable(x))
            yield from (x for x in given if isinstance(x, FunctionType))


def _does(rule: Callable[[ast.FunctionDef], bool], method: FunctionType) -> bool:
    """Whether a rule holds of what a method does with the masks that it is given."""
    names = method.__code__.co_varnames[: method.__code__.co_argcount + method.__code__.co_kwonlyargcount]
    if not any(name.endswith("mask") for name in names):
        return False
    return any(map(rule, _parsed(method)))


_PARSING = Lock()  # Python 3.11's parser fails where several threads use it at once


def _parsed(function: FunctionType) -> list[ast.FunctionDef]:
    """The source of a function, or nothing where it is not known."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
        with _PARSING:
            tree = ast.parse(source)
    except (OSError, SyntaxError):
        return []
    return [x for x in tree.body if isinstance(x, ast.FunctionDef)]
