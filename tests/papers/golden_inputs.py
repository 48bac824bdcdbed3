"""The inputs of the golden cases, made anew from their seed.

A golden file keeps what the authors' code chose and a fingerprint of its inputs, not the inputs. They follow from
numpy's PCG64 stream and element-wise arithmetic alone, and are rounded to 8 significant bits, so they are the
same numbers on every machine and in fp32, bf16 and fp16. The recipe, in units of a logit `q . k / sqrt(d)`:
a slow latent path that queries and keys of a KV head share, sink keys 0 to 3 and a few vertical keys that point
along directions every query holds, and, in odd query heads, a look back at a fixed lag.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

# Gains of query heads 0..3, repeating: local path, sink, vertical keys, look back.
GAINS = ((1.0, 1.0, 1.0, 0.0), (0.6, 1.3, 0.4, 1.0), (1.2, 0.5, 1.3, 0.0), (0.8, 0.9, 0.7, 1.0))


@attrs.frozen(eq=False)
class Golden:
    """One case: its configuration, its inputs, and every array that the authors' code gave."""

    config: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    q: Tensor  # [1, 4, M, D]
    k: Tensor  # [1, 2, N, D]
    v: Tensor  # [1, 2, N, D]

    @classmethod
    def load(cls, path: Path) -> Golden:
        """Raises AssertionError when the inputs made here are not the ones the case was made with."""
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files if name != "config"}
            config = json.loads(str(file["config"]))
        recipe = config["input"]
        q, k, v = structured(**{name: recipe[name] for name in ("seed", "b", "hq", "hkv", "n", "d")})
        q = q[:, :, recipe["n"] - (recipe.get("nq") or recipe["n"]) :] * np.float32(recipe.get("q_mul", 1.0))
        k = k * np.float32(recipe.get("k_mul", 1.0))
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in (q, k, v)))
        assert digest.hexdigest()[:16] == config["input_sha256"], "the inputs are not those of the golden case"
        return cls(config, arrays, *(torch.from_numpy(np.ascontiguousarray(x)) for x in (q, k, v)))

    @property
    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = self.config["params"]
        return params


def structured(*, seed: int, b: int, hq: int, hkv: int, n: int, d: int) -> tuple[Any, Any, Any]:
    """`q` `(b, hq, n, d)`, `k` and `v` `(b, hkv, n, d)`, float32."""
    random = np.random.default_rng(seed)
    root, group = math.sqrt(d), hq // hkv
    path_gain, direction = math.sqrt(9.0 / root), 0.5 * root
    q, k, v = np.empty((b, hq, n, d)), np.empty((b, hkv, n, d)), np.empty((b, hkv, n, d))
    for entry in range(b):
        for head in range(hkv):
            path = math.sqrt(0.35) * drift(random, n, d, 512.0) + math.sqrt(0.25) * drift(random, n, d, 48.0)
            path += math.sqrt(0.4) * random.standard_normal((5, d))[topics(random, n)]
            sink = np.where(random.random(d) < 0.5, -1.0, 1.0) / root
            vertical = np.where(random.random(d) < 0.5, -1.0, 1.0) / root
            turbulent = np.repeat(random.random((n + 95) // 96) < 0.2, 96)[:n]
            noise_gain = np.where(turbulent, 1.5, 0.45)[:, None]
            noise = random.standard_normal((n, d))
            columns = random.integers(8, n, 3 + n // 512)
            lag = n // 4 + int(random.integers(0, n // 4))

            keys = path_gain * path + noise_gain * noise
            for token, logit in enumerate((7.0, 4.0, 3.0, 2.0)):
                keys[token] = 0.25 * keys[token] + (logit * root / direction) * sink
            for token in columns:
                keys[token] = 0.5 * keys[token] + (5.5 * root / direction) * vertical
            k[entry, head] = keys

            look_back = np.zeros((n, d))
            look_back[lag:] = noise[: n - lag]
            look_back = look_back * (0.45 / noise_gain)
            for member in range(head * group, (head + 1) * group):
                local, to_sink, to_vertical, back = GAINS[member % 4]
                q[entry, member] = (
                    (local * path_gain) * path
                    + noise_gain * random.standard_normal((n, d))
                    + (to_sink * direction) * sink
                    + (to_vertical * direction) * vertical
                    + (back * 4.0 / (0.45 * root)) * look_back
                )
            half = math.sqrt(0.5)
            v[entry, head] = half * drift(random, n, d, 128.0) + half * random.standard_normal((n, d))
    return rounded(q), rounded(k), rounded(v)


def drift(random: np.random.Generator, n: int, d: int, memory: float) -> Array:
    """A stationary path of unit variance that forgets over `memory` tokens."""
    keep = 1.0 - 1.0 / memory
    step = math.sqrt(1.0 - keep * keep)
    path = random.standard_normal((n, d))
    for t in range(1, n):
        path[t] = keep * path[t - 1] + step * path[t]
    return path


def topics(random: np.random.Generator, n: int) -> NDArray[np.int64]:
    """One of five topics per token, in spans of 80 to 240 tokens, never twice in a row."""
    topic_of, start, topic = np.empty(n, np.int64), 0, 0
    while start < n:
        length = int(random.integers(80, 241))
        topic = (topic + int(random.integers(1, 5))) % 5
        topic_of[start : start + length] = topic
        start += length
    return topic_of


def rounded(x: Array) -> NDArray[np.float32]:
    """To a multiple of 2^-16, then to 8 significant bits, both to nearest even."""
    bits = (np.rint(x * 65536.0) / 65536.0).astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
