from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiosync.weights.resolve import resolve_model


def context() -> Any:
    leaf = SimpleNamespace(module="found")
    return SimpleNamespace(
        policy="policy",
        env=SimpleNamespace(transform=[leaf, [leaf, {"a.b": leaf, "c[0]": leaf, 'q"t': leaf}]]),
        models={"actor": leaf, "0": leaf, "": leaf},
    )


@pytest.mark.parametrize(
    "path",
    [
        "env.transform[0].module",
        "env.transform[-2].module",
        "env.transform[+0].module",
        "env.transform[1][0].module",
        "env.transform[1][1]['a.b'].module",
        'env.transform[ 1 ][1][ "c[0]" ].module',
        "env.transform[1][1]['q\"t'].module",
        'models["actor"].module',
        'models["0"].module',
        'models[""].module',
    ],
)
def test_paths_that_lead_somewhere(path: str) -> None:
    assert resolve_model(context(), path) == "found"


def test_a_path_may_start_with_a_subscript() -> None:
    assert resolve_model([SimpleNamespace(a=[5])], "[0].a[0]") == 5
    assert resolve_model(context(), "policy") == "policy"


@pytest.mark.parametrize(
    ("path", "part", "reached"),
    [
        ("nope", "nope", "the context"),
        ("env.nope.module", "nope", "'env', which is a SimpleNamespace"),
        ("env.transform[7].module", "[7]", "'env.transform', which is a list"),
        ("env.transform[1][9]", "[9]", "'env.transform[1]', which is a list"),
        ('env.transform["x"]', '["x"]', "'env.transform', which is a list"),
        ('models["critic"].module', '["critic"]', "'models', which is a dict"),
        ("models[0].module", "[0]", "'models', which is a dict"),
        ("env[0]", "[0]", "'env', which is a SimpleNamespace"),
    ],
)
def test_a_wrong_path_names_the_part_that_failed(path: str, part: str, reached: str) -> None:
    with pytest.raises(AttributeError) as caught:
        resolve_model(context(), path)
    message = str(caught.value)
    assert f"no {part!r} in {reached}" in message
    assert repr(path) in message
    assert caught.value.name == part


@pytest.mark.parametrize(
    "path",
    [
        "", ".", ".env", "env.", "env..transform", "env.transform[", "env.transform[0",
        "env.transform[]", "env.transform[x]", "env.transform[1:2]", "env.transform['a]",
        "env.transform]", "env.transform[0]module", "env .transform", "env.transform[0.5]",
        "env.[0]", "env.transform[0]..x", "__import__('os')", "models['a'+'b']", " env",
    ],
)  # fmt: skip
def test_a_malformed_path_is_an_attribute_error(path: str) -> None:
    with pytest.raises(AttributeError, match="cannot resolve"):
        resolve_model(context(), path)


def test_errors_of_properties_keep_their_cause() -> None:
    class Broken:
        @property
        def model(self) -> Any:
            raise KeyError("inner")

    with pytest.raises(AttributeError, match="inner") as caught:
        resolve_model(Broken(), "model")
    assert isinstance(caught.value.__cause__, KeyError)
