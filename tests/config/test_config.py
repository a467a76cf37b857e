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


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"WEIR_LISTN__PORT": "1"}, "listn"),
        ({"WEIR_LISTEN__PORT": "abc"}, "listen.port"),
        ({"WEIR_TIERS__T__BURST": "{tokens: 1, seconds: 5}"}, "tiers.t.burst.tokens"),
    ],
)
def test_a_mistake_that_a_variable_made_names_the_variable(tmp_path: Path, environ: dict[str, str], path: str) -> None:
    found = mistakes(tmp_path, {"health": {"port": "x"}}, environ)
    (variable,) = environ
    assert found[path].endswith(f"(set by {variable})")
    assert "set by" not in found["health.port"]


@pytest.mark.parametrize(
    ("tree", "path", "says"),
    [
        ({"quota_store": {"local_share": "much"}}, "quota_store.local_share", "auto, or a number"),
        ({"quota_store": {"local_share": 0}}, "quota_store.local_share", "auto, or a number"),
        ({"quota_store": {"url": "redis://host:port"}}, "quota_store.url", "redis://host:port/db"),
        ({"models": {"m": {"primary": []}}}, "models.m.primary", "at least one entry"),
        ({"models": {"m": {"primary": {}}}}, "models.m.primary", "must be a list"),
        ({"models": {"m": {}}}, "models.m.primary", "is required"),
        ({"models": {"m": {**MODEL["m"], "tokenizer": "gpt"}}}, "models.m.tokenizer", "tiktoken:<encoding>"),
        ({"keys": [{"id": "a b", "name": "a", "tier": "standard", "secret_sha256": "0" * 64}]}, "keys.0.id", "letters"),
        (
            {"keys": [{"id": "abcd", "name": "a", "tier": "standard", "secret_sha256": "A" * 64}]},
            "keys.0.secret_sha256",
            "64 hexadecimal digits in lower case",
        ),
        ({"backends": {**BACKEND, "a b": BACKEND["gpu"]}}, "backends.a b", "without spaces"),
        ({"backends": {"gpu": {"url": "http://h:99999"}}}, "backends.gpu.url", "http://host:port"),
        ({"backends": {"gpu": {"url": "http://["}}}, "backends.gpu.url", "http://host:port"),
        ({"listen": {"port": "8080"}}, "listen.port", "a whole number"),
        ({"listen": {"max_body_mb": "big"}}, "listen.max_body_mb", "must be a number"),
        ({"listen": {"host": 1}}, "listen.host", "must be text"),
        ({"listen": 5}, "listen", "a mapping"),
        ({"log": {"level": "loud"}}, "log.level", "'debug', 'info', 'warning' or 'error'"),
        ({"tiers": {"t": {"models": ["m", "gone"]}}}, "tiers.t.models.1", "no model 'gone'"),
        (
            {"keys": [{"id": "abcd", "name": "a", "tier": "standard", "team": "x", "secret_sha256": "0" * 64}]},
            "keys.0.team",
            "no team 'x'",
        ),
        (
            {"admin": {"tokens": [{"name": "ops", "token_env": "A"}, {"name": "ops", "token_env": "B"}]}},
            "admin.tokens.1.name",
            "another token 'ops'",
        ),
        ({"listen": {"port": 8082}}, "health.port", "listen.port is 8082 on the same address"),
        ({"admin": {"port": 8080}}, "admin.port", "listen.port is 8080 on the same address"),
        ({"health": {"host": "localhost", "port": 8081}}, "admin.port", "health.port is 8081 on the same address"),
        ({"listen": {"host": "::", "port": 1}, "health": {"host": "::1", "port": 1}}, "health.port", "listen.port"),
    ],
)
def test_a_mistake_is_said_in_plain_words_and_once(tmp_path: Path, tree: dict[str, Any], path: str, says: str) -> None:
    found = mistakes(tmp_path, {"backends": BACKEND, "models": MODEL, **tree})
    assert found.keys() == {path}
    assert says in found[path]


def test_what_does_not_fit_the_rest_is_listed_beside_other_mistakes(tmp_path: Path) -> None:
    tree = {"tiers": {"t": {"models": ["m"]}}, "listen": {"port": 8082}, "log": {"level": "loud"}}
    assert mistakes(tmp_path, tree).keys() == {"tiers.t.models.0", "health.port", "log.level"}


@pytest.mark.parametrize(
    "tree",
    [
        {"listen": {"port": 0}, "health": {"port": 0}, "admin": {"port": 0}},
        {"listen": {"host": "127.0.0.1", "port": 8082}, "health": {"host": "127.0.0.2"}},
        {"listen": {"host": "0.0.0.0", "port": 8082}, "health": {"host": "::1"}},
        {
            "teams": {"x": {}},
            "keys": [{"id": "abcd", "name": "a", "tier": "t", "team": "x", "secret_sha256": "0" * 64}],
        },
        {"quota_store": {"local_share": 0.5}},
        {"tiers": {"t": {"default_output_tokens": 900, "max_output_tokens": 100}}},
    ],
)
def test_what_fits_together_is_taken(tmp_path: Path, tree: dict[str, Any]) -> None:
    assert load(written(tmp_path, {"tiers": {"t": {}}, **tree}), {})


def test_a_name_that_stands_twice_is_refused_with_its_line_beside_the_other_mistakes(tmp_path: Path) -> None:
    text = "listen:\n  port: 1\n  host: a\n  port: 2\nlog: {level: loud}\nlisten: {}\n"
    path = tmp_path / "weir.yaml"
    assert mistakes(tmp_path, text).keys() == {f"{path}, line 4", f"{path}, line 6", "log.level"}


def test_a_mapping_that_is_merged_in_may_be_overridden(tmp_path: Path) -> None:
    text = "tiers:\n  a: &a {max_n: 1}\n  b: &b {<<: *a, max_n: 2}\n  c: {<<: *b, max_n: 3}\n"
    assert [tier.max_n for tier in load(written(tmp_path, text), {}).tiers.values()] == [1, 2, 3]


def test_a_name_that_a_variable_says_twice_is_refused(tmp_path: Path) -> None:
    assert "WEIR_LISTEN" not in mistakes(tmp_path, {"log": 1}, {"WEIR_LISTEN__TLS": "null"})
    assert "WEIR_TIERS__T" in mistakes(tmp_path, {}, {"WEIR_TIERS__T": "{max_n: 1, max_n: 2}"})


@pytest.mark.parametrize("text", ["[1, 2]", "just words", "a: [", "\x00", "a: 2024-13-01"])
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
