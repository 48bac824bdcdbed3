"""`blocksparse inspect`: its figures and maps, and the HTML file, without a browser and in a real one."""

from __future__ import annotations

import base64
import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
import zlib
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch

import blocksparse as bs
from blocksparse.hosts.transformers import attach
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.testing import make_qkv
from blocksparse.tools.cli.main import main
from blocksparse.tools.demo import TEXT
from blocksparse.tools.demo.model import Model, load
from blocksparse.tools.inspection.collect import Figures, Findings, Maps, Preset, collect, look
from blocksparse.tools.inspection.page import numbers, page
from tests.hosts.small_models import small_model
from tests.specs import asked, grid_of
from tests.stages import SMALL_BLOCKS
from tests.tiny_model import byte_tokenizer, save_tiny, tiny_llama

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PIPELINES: Mapping[str, AnyPipeline] = {**SMALL_BLOCKS, "s2o": bs.s2o(0.5)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and the report about it."""
    folder = tmp_path_factory.mktemp("inspect")
    save_tiny(folder / "tiny", byte_tokenizer())
    presets = ["--preset", "pbs_attn(0.5, block=32, S=64)", "--preset", "mean_pooling(0.5, block=32)"]
    options = ["--tokens", "600", "--out", str(folder / "report.html")]
    assert main(["inspect", str(folder / "tiny"), str(TEXT), *options, *presets]) == 0
    return folder


@pytest.mark.parametrize("name", PIPELINES)
def test_figures_are_those_of_the_trace(name: str) -> None:
    """With a row of pixels for each few queries, all queries are looked at."""
    traces = {name: pipeline.trace(*make_qkv(N=200, D=16)) for name, pipeline in PIPELINES.items()}
    figures, maps = look(traces, name, pixels=60)
    for each, trace in traces.items():
        torch.testing.assert_close(figures[each].density, trace.density()[0])
        torch.testing.assert_close(figures[each].covered_mass, trace.covered_mass()[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(figures[each].error, trace.error()[0], rtol=1e-4, atol=1e-6)
        assert (figures[each].kl >= -figures[each].covered_mass.log() - 1e-6).all()  # Jensen
    torch.testing.assert_close(maps.slots.sum(-1), torch.ones(4, 50))
    lost = maps.dropped.sum(-1).mean(-1).double()
    torch.testing.assert_close(lost, 1 - traces[name].covered_mass()[0], rtol=1e-4, atol=1e-6)
    assert (maps.text is None) == (traces[name].permutation.k_index is None)


def test_means_of_dropped_blocks_are_no_covered_mass() -> None:
    """They are in the output and in its lse. Their weights lie on no pair, so that no KL is known."""
    pipeline = bs.mean_pooling(0.4, block=32, executor=bs.MeanCorrectionExecutor(bs.ReferenceExecutor()))
    trace = pipeline.trace(*make_qkv(N=200, D=16))
    figures, _ = look({"means": trace}, "means", pixels=60)
    torch.testing.assert_close(figures["means"].covered_mass, trace.covered_mass()[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(figures["means"].error, trace.error()[0], rtol=1e-4, atol=1e-6)
    assert figures["means"].kl.isnan().all()


def test_exact_calls_cover_everything(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`flex_prefill` keeps every block of a short prompt, so dense attention runs, which gives no lse."""
    options = ["--tokens", "300", "--out", str(folder / "exact.html"), "--preset", "flex_prefill"]
    assert main(["inspect", str(folder / "tiny"), str(TEXT), *options]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^flex_prefill +100\.0% +100\.0% +0\.[0-9]%", printed, re.MULTILINE)
    assert "nan" not in printed
    trace = bs.Pipeline(bs.Identity(), bs.NoScorer(32), bs.Everything(), bs.AutoExecutor()).trace(
        *make_qkv(N=100, D=16)
    )
    assert trace.dense_because is not None
    figures, _ = look({"exact": trace}, "exact", pixels=50)
    assert torch.equal(figures["exact"].covered_mass, torch.ones(4, dtype=torch.float64))
    assert torch.equal(figures["exact"].kl, torch.zeros(4, dtype=torch.float64))


def test_maps_show_what_lies_where() -> None:
    """By hand: a pixel a token, keys in reverse inside of segments, one block of four dropped."""
    q, k, v = make_qkv(Hq=1, Hkv=1, N=8, D=8)
    order = torch.tensor([3, 2, 1, 0, 7, 6, 5, 4], dtype=torch.int32)
    permutation = bs.GlobalPermutation(order.view(1, 1, 1, 8), segment=4)
    grid = grid_of(q, k, 4, permutation=permutation)
    keep = torch.tensor([[True, False], [False, True]]).view(1, 1, 2, 2)
    scale, mask = 0.3, bs.BlockMask(keep, grid)
    scores = bs.MeanPoolScorer(4)(q, k, permutation, bs.AttentionSpec(scale=scale))
    output = bs.ReferenceExecutor()(q, k, v, mask, asked(mask, scale))
    _, maps = look(
        {"x": bs.Trace(q, k, v, bs.AttentionSpec(scale=scale), permutation, scores, mask, output)}, "x", pixels=8
    )
    logits = (q[0, 0] @ k[0, 0].T * scale).masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf"))
    weights = logits.softmax(-1)
    assert maps.text is not None
    torch.testing.assert_close(maps.text[0], weights)
    torch.testing.assert_close(maps.slots[0], weights[:, order.long()])
    expected = torch.zeros(8, 8)
    expected[4:, :4] = weights[4:, order[:4].long()]
    torch.testing.assert_close(maps.dropped[0], expected)
    seen = order <= torch.arange(8)[:, None]
    assert torch.equal(maps.kept[0].bool(), seen & (torch.arange(8) // 4 == torch.arange(8)[:, None] // 4))
    half = maps.halved()
    torch.testing.assert_close(half.slots.sum(-1), torch.ones(1, 4))


def noise(layers: int, heads: int, pixels: int) -> Findings:
    """Maps that compress badly."""
    generator = torch.Generator().manual_seed(0)
    preset = Preset("a", bs.pbs_attn(), kl=0.1)
    maps = {}
    for layer in range(layers):
        preset.layers[layer] = Figures(*(torch.rand(heads, generator=generator).double() for _ in range(4)))
        maps[layer] = Maps(*(torch.rand(heads, pixels, pixels, generator=generator) ** 9 for _ in range(4)))
    return Findings([preset], maps, 1.0, {})


@pytest.mark.slow
def test_many_heads_fit_into_five_megabytes() -> None:
    """Maps have as many pixels at 32K tokens as at 4K; those of SmolLM2's 270 heads are halved if need be."""
    assert len(page(noise(30, 9, 104), model="m", text="t", tokens=32768, device="d")) < 5_000_000


class Parts(HTMLParser):
    """Scripts by type, ids, and every address that the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: dict[str, str] = {}
        self.ids: list[str] = []
        self.loads: list[str] = []
        self._open: str | None = None

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        self.ids += [named["id"] or ""] if "id" in named else []
        self.loads += [named[x] or "" for x in ("src", "href") if x in named]
        self._open = (named.get("type") or "code") if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.scripts[self._open] = self.scripts.get(self._open, "") + data


def parts(text: str) -> Parts:
    found = Parts()
    found.feed(text)
    found.close()
    return found


def test_report_is_one_file_that_loads_nothing(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    found = parts(text)
    assert found.loads == ["data:,"]
    assert "http" not in re.sub(r"http://www\.w3\.org/\S+", "", found.scripts["code"])
    assert "@import" not in text
    assert "url(" not in text
    assert len(set(found.ids)) == len(found.ids)
    used = set(re.findall(r'byId\("([\w-]+)"\)', found.scripts["code"]))
    assert used <= set(found.ids)


def test_report_has_every_layer_head_and_map(folder: Path) -> None:
    data = json.loads(parts((folder / "report.html").read_text(encoding="utf-8")).scripts["application/json"])
    assert (data["model"], data["tokens"], data["text"]) == ("tiny", 600, TEXT.name)
    names = [preset["name"] for preset in data["presets"]]
    assert names == ["pbs_attn(0.5, block=32, S=64)", "mean_pooling(0.5, block=32)"]
    for preset in data["presets"]:
        assert [x["layer"] for x in preset["layers"]] == [0, 1]
        assert all(len(x["heads"][name]) == 4 for x in preset["layers"] for name in x["heads"])
        assert all(0 < x["mean"]["covered_mass"] <= 1 for x in preset["layers"])
        assert preset["next_token_kl"] > 0
        assert all(spent > 0 for spent in preset["seconds"].values())
    pixels = data["pixels"]
    assert 0 < pixels <= 128
    for layer in ("0", "1"):
        assert data["in_text_order"][layer] is False
        assert len(data["maps"][layer]) == 4
        for head in data["maps"][layer]:
            raw = np.frombuffer(zlib.decompress(base64.b64decode(head)), np.uint8).reshape(4, pixels, pixels)
            slots, kept, dropped, text = raw
            assert text[np.triu_indices(pixels, 1)].max() == 0  # nobody looks into the future
            assert (dropped <= slots).all()
            assert dropped[kept >= 252].max() == 0
            assert 0 < (kept > 0).mean() < 1


def test_layers_that_are_left_out_stay_dense(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the model reads with each preset, though they could be sparse."""
    reasons = iter((None, "it is left out"))  # of the first layer and of the second
    monkeypatch.setattr("blocksparse.tools.inspection.collect._not_plain", lambda *_: next(reasons))
    model, name = load(folder / "tiny", device=torch.device("cpu")), "mean_pooling"
    network, ids = model.network.float(), torch.randint(250, (1, 200))
    found = collect(model, ids, {name: PIPELINES[name]}, begin=lambda _: None)
    assert found.skipped == {1: "it is left out"}
    assert list(found.maps) == [0]
    dense = network.model(ids).last_hidden_state
    with attach(network, bs.Schedule(PIPELINES[name], dense=[1]), min_tokens=1, min_queries=1):
        sparse = network.model(ids).last_hidden_state
    right, other = (network.lm_head(x[0]).log_softmax(-1) for x in (dense, sparse))
    kl = float((right.exp() * (right - other)).sum(-1).mean())
    assert kl > 0
    assert found.presets[0].kl == pytest.approx(kl, rel=1e-3)


def test_a_preset_that_keeps_everything_changes_no_prediction() -> None:
    """Rounding would make some of these KL divergences negative."""
    every = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), bs.TopCdf(0.999999), bs.AutoExecutor(dense_below=0))
    for seed in range(3):
        network, ids = tiny_llama(seed), torch.arange(200)[None]
        model = Model(network.requires_grad_(False), None, "tiny", torch.device("cpu"))
        found = collect(model, ids, {"every": every}, begin=lambda _: None)
        assert 0 <= found.presets[0].kl < 1e-6


@pytest.mark.parametrize(
    ("kind", "skipped"),
    [
        ("zamba", {-1: "its attention does not say in which layer it is"}),
        ("hrm_text", dict.fromkeys((0, 1), "it attends 8 times")),
        ("doge", dict.fromkeys((0, 1), "it stays dense: not causal")),
    ],
)
def test_layers_that_have_no_one_call_are_left_out(kind: str, skipped: dict[int, str]) -> None:
    """The figures would be those of the last of their calls, or of another attention than the model's."""
    network, ids = small_model(kind), torch.randint(3, 250, (1, 200))
    model = Model(network, None, kind, torch.device("cpu"))
    found = collect(model, ids, {"mean_pooling": PIPELINES["mean_pooling"]}, begin=lambda _: None)
    assert (found.skipped, found.maps, found.presets[0].layers) == (skipped, {}, {})


def test_what_a_text_is_called_cannot_end_the_script() -> None:
    text = page(noise(1, 1, 4), model="</script><b>", text="<!--", tokens=1, device="d")
    assert json.loads(parts(text).scripts["application/json"])["model"] == "</script><b>"
    assert text.count("</script>") == 2


def test_figures_that_are_not_known_are_null() -> None:
    findings = noise(1, 2, 4)
    findings.presets[0].kl = float("nan")
    findings.presets[0].layers[0].covered_mass[1] = float("inf")
    written = numbers(findings)["presets"][0]
    assert written["next_token_kl"] is None
    assert written["layers"][0]["heads"]["covered_mass"][1] is None
    json.dumps(written, allow_nan=False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["/nowhere"], "the model must be a folder that a transformers model was saved in: /nowhere"),
        (["TINY", "/nowhere"], "'TEXT' must be a readable UTF-8 text: /nowhere"),
        (["TINY", "--tokens", "5"], "'--tokens' must be at least 128: 5"),
        (["TINY", "--tokens", "2000"], "'--tokens' must be at most 1024, what the model can read: 2000"),
        (["TINY", "SHORT"], "'TEXT' must have at least 128 tokens, or there is nothing to skip: 5"),
        (["TINY", "--out", "/nowhere/x.html"], "'--out' must be a file in a folder that exists: /nowhere/x.html"),
        (["TINY", "SHORT", "--out", "SHORT"], "'--out' must be another file than what is read: "),
        (["TINY", "--out", "CONFIG"], "'--out' must be another file than what is read: "),
        (["TINY", "--converted", "x"], "'--converted' is for the model 'smollm2' alone, and this is "),
        (["TINY", "--preset", "x"], "'--preset' must be one of auto, pbs_attn"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_refusals_are_one_sentence(
    arguments: list[str], sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "short.txt").write_text("short")
    files = {"TINY": "tiny", "SHORT": "short.txt", "CONFIG": "tiny/config.json"}
    names = {name: str(folder / file) for name, file in files.items()}
    fitting = [] if "--tokens" in arguments else ["--tokens", "600"]
    assert main(["inspect", *(names.get(x, x) for x in arguments), *fitting]) == 1
    printed, progress = capsys.readouterr()
    assert not printed
    *before, error = progress.splitlines()
    assert error.startswith(f"blocksparse inspect: {sentence}")
    assert before in ([], ["getting the model ready"])


def test_json_has_the_figures_and_no_maps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tokens", "300", "--out", str(folder / "second.html"), "--preset", "s2o", "--json"]
    assert main(["inspect", str(folder / "tiny"), *options]) == 0
    printed, progress = capsys.readouterr()
    written = json.loads(printed)
    assert written["presets"][0]["name"] == "s2o"
    assert "maps" not in written
    assert progress.splitlines()[:3] == [
        "getting the model ready",
        "looking for layers that can be sparse",
        "reading with dense attention",
    ]


CHECK = """<!doctype html><body><script>
const frame = (width) => new Promise((done) => {
  const made = document.createElement("iframe");
  made.width = width; made.height = 900; made.src = "report.html";
  const drawn = () => made.contentDocument.querySelectorAll(".head canvas[data-drawn]").length === 8;
  const wait = (left) => drawn() || !left ? done([width, look(made)]) : setTimeout(wait, 100, left - 1);
  made.onload = () => {
    made.contentDocument.getElementById("all").scrollIntoView();  // small maps are drawn when they come into view
    wait(150);
  };
  document.body.append(made);
});
function look(made) {
  const page = made.contentDocument, view = made.contentWindow, found = [];
  const clipped = (x) => x.closest(".scroll") !== null;
  const looked = "h1,h2,h3,p,select,label,figcaption,figure canvas,.head,.key span,svg text";
  const shown = [...page.querySelectorAll(looked)]
    .filter((x) => !clipped(x)).map((x) => [x, x.getBoundingClientRect()]).filter(([, r]) => r.width && r.height);
  for (const [i, [one, a]] of shown.entries()) {
    if (a.left < -1 || a.right > view.innerWidth + 1) found.push("outside: " + one.textContent);
    for (const [other, b] of shown.slice(i + 1)) {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1.5 && down > 1.5 && !one.contains(other) && !other.contains(one))
        found.push(one.textContent + " | " + other.textContent);
    }
  }
  const ink = (id) => {
    const canvas = page.getElementById(id), n = canvas.width;
    const all = canvas.getContext("2d").getImageData(0, 0, n, n).data;
    let coloured = 0;
    for (let i = 0; i < all.length; i += 4)
      coloured += all[i + 3] === 255 && all[i] + all[i + 1] + all[i + 2] < 765;
    return coloured / (n * n);
  };
  return { found, ready: page.body.dataset.ready, wide: page.documentElement.scrollWidth <= view.innerWidth,
    ink: ["map-text", "map-slots", "map-dropped"].map(ink), bars: page.querySelectorAll("svg rect").length,
    small: page.querySelectorAll(".head canvas[data-drawn]").length,
    rows: page.querySelectorAll("#presets tr").length };
}
Promise.all([frame(1280), frame(390)]).then((all) =>
  fetch("/", { method: "POST", body: JSON.stringify(Object.fromEntries(all)) }));
</script></body>"""


class Listening(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, and keeps what the page sends."""

    sent: Queue[bytes]

    def do_POST(self) -> None:
        self.sent.put(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_report_in_a_browser(folder: Path) -> None:
    """The console is empty; at 1280 and 390 pixels nothing overlaps or sticks out, and maps are drawn."""
    (folder / "check.html").write_text(CHECK)
    Listening.sent = Queue()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Listening, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    command = [
        str(CHROMIUM),
        *["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1800,1200"],
        f"--user-data-dir={folder / 'profile'}",
        f"http://127.0.0.1:{server.server_port}/check.html",
    ]
    said = folder / "browser.log"
    try:
        with said.open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as browser:
            try:
                checked = json.loads(Listening.sent.get(timeout=60))
            finally:
                browser.terminate()
    finally:
        server.shutdown()
        server.server_close()
    assert not [line for line in said.read_text(errors="replace").splitlines() if "CONSOLE" in line]
    for width in ("1280", "390"):
        view = checked[width]
        assert view["ready"] == "true"
        assert view["found"] == []
        assert view["wide"]
        assert view["rows"] == 4
        assert view["bars"] >= 4 * 2 + 1 + 2 * 4  # layers by four charts; dense; two presets by four stages
        assert view["small"] == 2 * 4
        text, slots, dropped = view["ink"]
        assert 0.4 < text < 0.6  # the past
        assert text <= slots + 0.05
        assert 0 < dropped < slots
