"""File and environment into values: everything that is wrong is said at once, with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from meter.config import Config, ConfigError, load

BACKEND = {"gpu": {"url": "http://127.0.0.1:8000"}}
MODEL = {"m": {"primary": [{"backend": "gpu", "model": "x"}]}}


def written(tmp_path: Path, tree: Any) -> Path:
    path = tmp_path / "weir.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree), encoding="utf-8")
    return path


def mistakes(tmp_path: Path, tree: Any, environ: dict[str, str] | None = None) -> dict[str, str]:
    with pytest.raises(ConfigError) as wrong:
        load(written(tmp_path, tree), environ or {})
    return dict(wrong.value.mistakes)


def test_without_a_file_everything_has_its_default() -> None:
    config = load(None, {})
    assert config == Config()
    assert (config.listen.port, config.admin.port, config.health.port) == (8080, 8081, 8082)


def test_every_mistake_is_listed_with_its_path(tmp_path: Path) -> None:
    tree = {
        "listen": {"port": 99_999, "prot": 1},
        "quota_store": {"url": "mysql://x"},
        "backends": {"gpu": {"url": "ftp://x"}},
        "models": {"m": {"primary": [{"backend": "nope", "model": "x"}], "overflow": [{"backend": "gpu"}]}},
        "tiers": {"t": {"rate": {"tokens": 100, "seconds": 60}, "burst": {"tokens": 1, "seconds": 5}, "max_n": "4"}},
        "prices": {"m@nope": {"prompt": 1, "completion": -2}},
        "keys": [{"id": "abcd", "name": "a", "tier": "t2", "secret_sha256": "xyz"}],
    }
    assert mistakes(tmp_path, tree).keys() == {
        "listen.port",
        "listen.prot",
        "quota_store.url",
        "backends.gpu.url",
        "models.m.primary.0.backend",
        "models.m.overflow.0.model",
        "tiers.t.max_n",
        "tiers.t.burst.tokens",
        "prices.m@nope.completion",
        "prices.m@nope",
        "keys.0.tier",
        "keys.0.secret_sha256",
    }


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"burst": {"tokens": 0, "seconds": 5}}, "burst.tokens"),
        ({"burst": {"tokens": 1999, "seconds": 5}}, "burst.tokens"),
        ({"cap": {"tokens": 1999, "seconds": 3600}}, "cap.tokens"),
        ({"rate": {"tokens": 1.5, "seconds": 60}}, "rate.tokens"),
        ({"rate": {"tokens": 10, "seconds": 0}}, "rate.seconds"),
        ({"rate": {"tokens": 10, "seconds": 31_622_401}}, "rate.seconds"),
        ({"rate": {"tokens": "10", "seconds": 60}}, "rate.tokens"),
        ({"cap": {"tokens": True, "seconds": 60}}, "cap.tokens"),
        ({"cap": {"tokens": 10**15 + 1, "seconds": 60}}, "cap.tokens"),
        ({"on_cap": "maybe"}, "on_cap"),
        (
            {"shadow": {"rate": {"tokens": 10, "seconds": 60}, "burst": {"tokens": 9, "seconds": 5}}},
            "shadow.burst.tokens",
        ),
        ({"shadow": {"rate": {"tokens": 10, "seconds": 60}, "cap": {"tokens": 9, "seconds": 60}}}, "shadow.cap.tokens"),
        ({"shadow": {"cap": {"tokens": 10, "seconds": 0}}}, "shadow.cap.seconds"),
        ({"shadow": {"max_parallel": 3}}, "shadow.max_parallel"),
    ],
)
def test_limits_that_make_no_sense_are_refused(tmp_path: Path, fields: dict[str, Any], wrong: str) -> None:
    assert mistakes(tmp_path, {"tiers": {"t": fields}}).keys() == {f"tiers.t.{wrong}"}


def test_a_tiers_own_limits_and_its_shadow_are_judged_together_whatever_else_is_wrong(tmp_path: Path) -> None:
    shadow = {
        "rate": {"tokens": 10, "seconds": 60},
        "burst": {"tokens": 0, "seconds": 5},
        "cap": {"tokens": 9, "seconds": 9},
    }
    tier = {"cap": {"tokens": 1999, "seconds": 3600}, "shadow": shadow}
    wrong = {"tiers.t.cap.tokens", "tiers.t.shadow.burst.tokens", "tiers.t.shadow.cap.tokens"}
    assert mistakes(tmp_path, {"tiers": {"t": tier}}).keys() == wrong
    assert mistakes(tmp_path, {"tiers": {"t": {**tier, "max_n": 0}}}).keys() == {*wrong, "tiers.t.max_n"}


@pytest.mark.parametrize(
    "fields",
    [
        {"rate": None, "burst": None, "cap": None},
        {"shadow": {"cap": {"tokens": 10, "seconds": 3600}}},
        {"cap": {"tokens": 0, "seconds": 3600}},
        {"rate": {"tokens": 0, "seconds": 60}},
        {"rate": {"tokens": 100.0, "seconds": 60}, "burst": None},
    ],
)
def test_null_is_unlimited_and_zero_blocks(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert load(written(tmp_path, {"tiers": {"t": fields}}), {}).tiers["t"].policy.max_parallel == 8


def test_the_environment_stands_over_the_file_whatever_the_case_of_its_names(tmp_path: Path) -> None:
    path = written(tmp_path, {"backends": {"Gpu": {"url": "http://a:1"}}, "listen": {"port": 1}})
    environ = {"WEIR_LISTEN__PORT": "9000", "WEIR_BACKENDS__GPU__URL": "http://b:2", "WEIR_ADMIN_TOKEN": "x"}
    config = load(path, environ)
    assert (config.listen.port, config.backends["Gpu"].url) == (9000, "http://b:2")


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"WEIR_LISTEN__PORT": "abc"}, "listen.port"),
        ({"WEIR_LISTEN__PROT": "1"}, "listen.prot"),
        ({"WEIR_LISTEN__PORT": "[1"}, "WEIR_LISTEN__PORT"),
        ({"WEIR_LISTEN__PORT__X": "1"}, "WEIR_LISTEN__PORT__X"),
    ],
)
def test_a_mistake_in_the_environment_is_named(tmp_path: Path, environ: dict[str, str], path: str) -> None:
    assert path in mistakes(tmp_path, {"listen": {"port": 1}}, environ)


@pytest.mark.parametrize("text", ["[1, 2]", "just words", "a: [", "\x00"])
def test_a_file_that_is_no_mapping_is_said_so(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as wrong:
        load(path, {})
    assert [where for where, _ in wrong.value.mistakes] == [str(path)]


def test_a_missing_file_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.yaml", {})


def test_secrets_come_from_the_environment_or_a_file_and_never_from_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("from-file\n")
    monkeypatch.setenv("KEY_VARIABLE", "from-env")
    tree = {
        "backends": {
            "a": {"url": "http://a", "api_key_env": "KEY_VARIABLE"},
            "b": {"url": "http://b", "api_key_file": str(tmp_path / "secret")},
            "c": {"url": "http://c", "api_key_env": "UNSET_VARIABLE"},
        }
    }
    backends = load(written(tmp_path, tree), {}).backends
    assert [backends[name].api_key for name in "abc"] == ["from-env", "from-file", None]
    assert mistakes(tmp_path, {"backends": {"a": {"url": "http://a", "api_key": "secret"}}}).keys() == {
        "backends.a.api_key"
    }


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
sections = st.sampled_from(list(Config.model_fields))


@given(
    tree=st.dictionaries(sections, json | st.dictionaries(st.sampled_from(["m", "primary", "tier"]), json), max_size=4)
)
def test_whatever_the_file_holds_the_answer_is_values_or_mistakes(tree: dict[str, Any]) -> None:
    tree = {name: section for name, section in tree.items() if section is not None}
    try:
        Config.model_validate(tree)
    except ValueError:
        with pytest.raises(ConfigError):
            load_tree(tree)
    else:
        assert isinstance(load_tree(tree), Config)


def load_tree(tree: dict[str, Any]) -> Config:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(tree, file)
        file.flush()
        return load(Path(file.name), {})
