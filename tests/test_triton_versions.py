"""Several processes of each version of Triton: what is compared with what."""

from __future__ import annotations

from benchmarks.triton_versions import compared


def test_processes_are_compared_with_those_beside_them() -> None:
    rounds = {
        "3.6": [[{"a": 1.0, "b": 5.0}, {"a": 2.0, "b": 5.0}, {"a": 1.5, "b": 5.0}], [{"a": 3.0, "b": 5.0}] * 3],
        "3.9": [[{"a": 1.1}, {"a": 2.2}, {"a": 1.65}], [{"a": 3.3}] * 3],
    }
    a, b = compared(rounds)
    assert a["call"] == "a"
    assert abs(a["over"]["3.9"] - 1.1) < 1e-9
    assert a["ms"]["3.6"] == 2.25
    assert a["by_process"]["3.6"] == [1.5, 3.0]
    assert a["spread"] == 2
    assert b["over"] == {"3.6": 1.0}
    assert b["spread"] == 1
