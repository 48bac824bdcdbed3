"""`blocksparse tune`: what attends in every layer of a model, chosen by what the model then says."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blocksparse.check.validators import UserError, shown
from blocksparse.presets.named import TuneError
from blocksparse.presets.plan import Plan
from blocksparse.tools.cli.options import Commands, Given, add_command, check_out, extra, only_errors
from blocksparse.tools.demo import TEXT, read_text
from blocksparse.tools.demo.model import Model
from blocksparse.tools.tune.journal import Report
from blocksparse.tools.tune.prompts import TunePrompt, prompts_from_file, prompts_from_text
from blocksparse.tools.tune.run import Budget, ErrorBounds, sparge_search, tune
from blocksparse.tools.tune.session import POSITIONS

_SECONDS_BETWEEN_LINES = 10.0
# Options that only one strategy knows, and their defaults.
_OF_KL: dict[str, Any] = {
    "minimise": "time",
    "batch": 1,
    "text_kl": Budget().text_kl,
    "answer_kl": Budget().answer_kl,
    "head_groups": 1,
}
_OF_SPARGE: dict[str, Any] = {"l1": ErrorBounds().l1, "l2": ErrorBounds().l2}
# Options for prompts that are made from a text, which --prompts replaces.
_OF_TEXT: dict[str, Any] = {"tokens": [4096], "text": TEXT, "count": 2, "held": None, "seed": 0}


_EXAMPLES = """\
  blocksparse tune path/to/model
  blocksparse tune path/to/model --tokens 8192 --count 6 --out plan.json
  blocksparse tune path/to/model --prompts prompts.jsonl --minimise density
"""


def add_to(commands: Commands) -> None:
    """Add the subcommand `tune`."""
    parser = add_command(
        commands,
        "tune",
        _run,
        summary="choose the attention of every layer within a KL budget, and write a plan",
        description="Makes one layer at a time sparse, and compares the next-token distributions with those of\n"
        "dense attention, over a text and at answers. A plan within the budgets of both is verified on\n"
        "other prompts. A run that was interrupted continues when the same command runs again.",
        examples=_EXAMPLES,
    )
    parser.register("action", None, Given)
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="folder of a causal language model of transformers"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("plan.json"), help="file for the plan; a journal lies next to it"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        metavar="N",
        help="lengths of the prompts made from --text; with one length, prompts of half of it are made too",
    )
    parser.add_argument("--text", type=Path, help="text to make prompts from, with planted facts")
    parser.add_argument("--count", type=int, help="prompts of each length for comparing candidates")
    parser.add_argument(
        "--held",
        type=int,
        help="prompts of each length for verifying plans; default: as many as --count; more cost little time",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        help='JSON Lines file with your prompts, {"prompt": ..., "answer": ...}; every second one verifies',
    )
    parser.add_argument("--strategy", choices=("kl", "sparge"), default="kl", help="how candidates are chosen")
    parser.add_argument("--minimise", choices=("time", "density"), help="what the plan minimises")
    parser.add_argument("--batch", type=int, help="prompts per call, for measuring times")
    parser.add_argument("--text-kl", type=float, help="KL budget over the text, in nats")
    parser.add_argument("--answer-kl", type=float, help="KL budget at tokens of answers, in nats")
    parser.add_argument(
        "--positions", type=int, help="number of positions of a text at which predictions are compared"
    )
    parser.add_argument("--head-groups", type=int, help="groups of KV heads per layer, each with its own choice")
    parser.add_argument("--seed", type=int, help="seed of the planted facts")
    parser.add_argument("--l1", type=float, help="with --strategy sparge: error bound for tau and theta")
    parser.add_argument("--l2", type=float, help="with --strategy sparge: error bound with lambda")
    parser.add_argument("--device", help="device to run on; default: a GPU if there is one")
    parser.set_defaults(positions=POSITIONS, given=frozenset(), **_OF_TEXT, **_OF_KL, **_OF_SPARGE)


def _run(arguments: argparse.Namespace) -> int:
    try:
        return _tune(arguments)
    except ValueError as error:  # of an option that `tune` itself refuses
        raise UserError(str(error)) from None
    except RuntimeError as error:
        if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
            raise
        raise UserError(
            f"the device has too little memory for calls of {_prompts_in(arguments.batch)}. Take shorter prompts "
            f"or a smaller --batch. What was measured is kept: {str(error).splitlines()[0]}"
        ) from None


def _check(arguments: argparse.Namespace) -> None:
    """Refuse, before anything takes time, what could not be obeyed."""
    for name in _OF_KL if arguments.strategy == "sparge" else _OF_SPARGE:
        if name in arguments.given:
            raise TuneError(
                f"'--{name.replace('_', '-')}' does not apply to '--strategy {arguments.strategy}': "
                f"{getattr(arguments, name)}. Leave one of the two out."
            )
    for name in _OF_TEXT if arguments.prompts is not None else ():
        if name in arguments.given:
            raise TuneError(
                f"'--{name}' does not apply to '--prompts', of which every second one verifies: "
                f"{shown(getattr(arguments, name))}. Leave one of the two out."
            )
    if arguments.out.is_dir():
        raise TuneError(f"'--out' must be a file, the plan: {arguments.out} is a folder. Add a file name.")
    check_out(arguments.out, arguments.text, arguments.prompts, arguments.model)


def _tune(arguments: argparse.Namespace) -> int:
    """Tune, write the plan, and print its cost and its KL."""
    _check(arguments)
    model = _load(arguments.model, arguments.device)
    network = model.network
    prompts, held = _prompts(model.tokenizer, arguments)
    longest = max(prompt.ids.shape[1] for prompt in (*prompts, *held))
    if longest > (most := model.longest):
        raise TuneError(
            f"prompts must be of at most {most} tokens, what the model can read: {longest}. Give fewer --tokens."
        )
    journal = arguments.out.with_name(arguments.out.name + ".journal")
    begin = time.perf_counter()
    with only_errors(), _progress() as report:  # which executor runs is said once, by the plan
        given: dict[str, Any] = {"journal": journal, "positions": arguments.positions, "report": report}
        if arguments.strategy == "sparge":
            bounds = ErrorBounds(arguments.l1, arguments.l2)
            plan = sparge_search(network, prompts, held, bounds=bounds, **given)
        else:
            given |= {name: getattr(arguments, name) for name in ("minimise", "batch", "head_groups")}
            budget = Budget(arguments.text_kl, arguments.answer_kl)
            plan = tune(network, prompts, held, budget=budget, **given)
    plan.save(arguments.out)
    print(summary(plan))
    print(f"written in {time.perf_counter() - begin:.0f} s: {arguments.out}; its measurements: {journal}")
    return 0


def summary(plan: Plan) -> str:
    """The attention of each layer, and the cost and KL of the whole plan."""
    found, of_plan = plan.evidence, plan.evidence.plan
    lines = [f"{'layer':>8}  {'density':>7}  {'text KL':>8}  {'answers':>8}  attention"]
    for part in plan.layers:
        heads = "" if part.heads is None else f":{part.heads[0]}-{part.heads[-1]}"
        text_kl, answer_kl = ("-" if kl is None else f"{kl:.5f}" for kl in (part.text_kl, part.answer_kl))
        lines.append(
            f"{f'{part.layer}{heads}':>8}  {part.density:7.3f}  {text_kl:>8}  {answer_kl:>8}  "
            f"{part.attention or 'dense'}"
        )
    return "\n".join(
        [
            *lines,
            f"on held prompts: density {of_plan.density:.3f}, KL over the text {of_plan.text_kl:.4f} and at "
            f"answers {of_plan.answer_kl:.4f} (less noise of {found.noise_text_kl:.4f} and "
            f"{found.noise_answer_kl:.4f})",
            *(
                f"at {each.tokens} tokens: density {each.density:.3f}, KL {each.text_kl:.4f} and "
                f"{each.answer_kl:.4f}, answers found {each.found} of {each.answers}, by dense attention "
                f"{each.dense_found}"
                for each in of_plan.lengths
            ),
            f"answers found: {of_plan.found} of {found.answers}, by dense attention {found.dense_found}; "
            f"predicted time of attention in layers that can be sparse, {_prompts_in(found.batch)} in a call: "
            f"{of_plan.ms:.1f} ms, dense {found.dense_ms:.1f} ms on {found.device}",
        ]
    )


def _prompts_in(batch: int) -> str:
    return "1 prompt" if batch == 1 else f"{batch} prompts"


def _load(folder: Path, device: str | None) -> Model:
    with extra("tune"):
        import torch
        from transformers.utils.logging import disable_progress_bar, set_verbosity_error

        from blocksparse.tools.demo.model import load
    disable_progress_bar()
    set_verbosity_error()
    try:
        place = torch.empty(0, device=device or ("cuda" if torch.cuda.is_available() else "cpu")).device
    except (RuntimeError, AssertionError) as error:
        raise TuneError(f"'--device' cannot be used: {device}: {str(error).splitlines()[0]}") from None
    if place.type == "meta":
        raise TuneError("'--device' cannot be used: meta: its tensors hold no numbers. Name cpu or cuda.")
    return load(folder, device=place)


def _prompts(tokenizer: Any, arguments: argparse.Namespace) -> tuple[Sequence[TunePrompt], Sequence[TunePrompt]]:
    """Prompts to compare candidates on, and prompts to verify on."""
    held = arguments.count if arguments.held is None else arguments.held
    for name, number in (("count", arguments.count), ("held", held)):
        if number < 1:
            raise TuneError(f"'--{name}' must be at least 1: {number}")
    if arguments.prompts is not None:
        every = prompts_from_file(tokenizer, arguments.prompts)
        if len(every) < 2:
            raise TuneError(
                f"{arguments.prompts} must have at least two prompts, one to tune and one to verify on. Add some."
            )
    else:
        text = read_text(arguments.text, "--text")
        total = arguments.count + held
        lengths = arguments.tokens if len(arguments.tokens) > 1 else [arguments.tokens[0] // 2, *arguments.tokens]
        compared = [number * total // arguments.count for number in range(arguments.count)]
        prompts: list[TunePrompt] = []
        held_back: list[TunePrompt] = []
        for number, tokens in enumerate(dict.fromkeys(lengths)):
            # Of each part of the text prompts of all lengths are made, so that none is compared and verified on.
            seed = arguments.seed + number
            try:
                every = prompts_from_text(tokenizer, text, tokens=tokens, count=total, seed=seed)
            except TuneError as error:
                if tokens in arguments.tokens:
                    raise
                raise TuneError(
                    f"'--tokens {arguments.tokens[0]}' alone also makes prompts of half of it, {tokens} tokens: "
                    f"{error} Or give two lengths."
                ) from None
            prompts += [every[i] for i in compared]
            held_back += [every[i] for i in range(total) if i not in compared]
        return prompts, held_back
    return every[::2], every[1::2]


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar in a terminal, else a line now and then. It goes to stderr."""
    with extra("tune"):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("reading", total=1.0, left="")
        last = -_SECONDS_BETWEEN_LINES

        def report(doing: str, share: float, seconds_left: float | None) -> None:
            nonlocal last
            left = "" if seconds_left is None else f"about {_time(seconds_left)} left"
            bar.update(task, description=doing, completed=share, left=left)
            if not console.is_terminal and time.perf_counter() - last >= _SECONDS_BETWEEN_LINES:
                last = time.perf_counter()
                console.print(f"{doing}: {100 * share:.0f} % {left}".rstrip(), highlight=False)

        yield report


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
