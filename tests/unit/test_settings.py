from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outboxio import Outbox
from outboxio.errors import OutboxError, SettingsError
from outboxio.settings import Settings
from outboxio.sync import Producer
from outboxio.testing import memory_outbox

LEAFS = Settings.__struct_fields__


def load(source: Any = None, /, **environ: str) -> Settings:
    return Settings.load(source, environ=environ)


def refused(source: Any = None, /, **environ: str) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        load(source, **environ)
    return caught.value


def settings_with(leaf: str, value: Any) -> Settings:
    return Settings(**{leaf: value})


def refused_in_code(**leafs: Any) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        Settings(**leafs)
    return caught.value


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "outboxio.toml"


# --- leafs and defaults --------------------------------------------------------------------------


def test_names_and_defaults_are_the_published_ones() -> None:
    assert msgspec.structs.asdict(Settings()) == {
        "fanout_poll_delay": timedelta(seconds=1),
        "fanout_batch_size": 1000,
        "handling_enabled": True,
        "handling_poll_delay": timedelta(seconds=1),
        "handling_batch_size": 1000,
        "handling_max_backoff_cap": timedelta(minutes=5),
        "handling_retention_window": timedelta(days=7),
        "handler_timeout": timedelta(seconds=60),
        "concurrency": 100,
        "max_hops": 32,
        "max_crashes": 3,
        "outcome_batch": 500,
        "outcome_delay": timedelta(milliseconds=20),
        "shutdown_timeout": timedelta(seconds=25),
        "lock_heartbeat": timedelta(seconds=5),
        "spread_after": timedelta(seconds=10),
        "failing_alert_after": timedelta(hours=1),
        "subscription_ttl": timedelta(days=7),
        "connect_timeout": timedelta(seconds=10),
        "statement_timeout": timedelta(seconds=60),
        "action_statement_timeout": timedelta(0),
        "notify": True,
        "record_empty_actions": True,
        "validate_events": True,
        "purge_enabled": True,
        "keep_finished": timedelta(days=7),
        "keep_dead": timedelta(days=90),
        "dedup_retention": timedelta(days=100),
        "pool_timeout": timedelta(seconds=30),
        "lock_sessions": 8,
        "balance": "partitioned",
    }


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Settings().concurrency = 1  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


def test_settings_compare_hash_copy_and_pickle_by_value() -> None:
    settings = Settings(handler_timeout="2m")

    assert settings == Settings(handler_timeout=120) != Settings()
    assert hash(settings) == hash(Settings(handler_timeout=120))
    assert pickle.loads(pickle.dumps(settings)) == settings


# --- in code -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [timedelta(milliseconds=500), 0.5, "0.5", "500ms", "PT0.5S"])
def test_the_constructor_accepts_every_spelling_of_a_duration(value: timedelta | float | str) -> None:
    assert Settings(fanout_poll_delay=value).fanout_poll_delay == timedelta(milliseconds=500)


def test_a_changed_copy_is_converted_and_validated_too() -> None:
    assert msgspec.structs.replace(Settings(), keep_dead="1d").keep_dead == timedelta(days=1)
    with pytest.raises(SettingsError):
        msgspec.structs.replace(Settings(), keep_dead=0)


def test_a_bad_value_is_refused_with_key_value_and_expectation() -> None:
    error = refused_in_code(concurrency=0)

    assert (error.key, error.value, error.expected) == ("concurrency", 0, "a whole number, 1 or more")
    assert str(error) == "setting concurrency = 0: expected a whole number, 1 or more"
    assert isinstance(error, OutboxError)


@pytest.mark.parametrize("value", [0, -1, "50", 1.0, True, None])
def test_a_count_is_a_positive_integer(value: object) -> None:
    assert refused_in_code(outcome_batch=value).key == "outcome_batch"


@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_a_switch_accepts_only_true_or_false(value: object) -> None:
    assert refused_in_code(notify=value).expected == "true or false"


@pytest.mark.parametrize("value", [True, None, "soon", "", -1, float("nan"), float("inf"), timedelta(-1)])
def test_a_value_that_is_not_a_duration_is_refused(value: object) -> None:
    error = refused_in_code(handler_timeout=value)

    assert error.key == "handler_timeout"
    assert error.expected.startswith("a duration: ")


@pytest.mark.parametrize("leaf", [name for name in LEAFS if isinstance(getattr(Settings(), name), timedelta)])
def test_only_batching_delay_grace_period_and_limits_may_be_zero(leaf: str) -> None:
    if leaf in {"outcome_delay", "shutdown_timeout", "action_statement_timeout"}:
        assert getattr(settings_with(leaf, 0), leaf) == timedelta(0)
    else:
        assert refused_in_code(**{leaf: 0}).key == leaf


@pytest.mark.parametrize("leaf", ["fanout_poll_delay", "handling_poll_delay"])
def test_a_poll_delay_has_a_minimum_and_a_maximum(leaf: str) -> None:
    assert refused_in_code(**{leaf: "999us"}).expected == "a duration from 1ms to 1d"
    assert refused_in_code(**{leaf: "2d"}).value == "2d"
    assert settings_with(leaf, "1ms")
    assert settings_with(leaf, "1d")


def test_a_heartbeat_is_longer_than_a_garbage_collection_pause() -> None:
    assert refused_in_code(lock_heartbeat="49ms").expected == "a duration from 50ms to 1d"
    assert Settings(lock_heartbeat="50ms").lock_heartbeat == timedelta(milliseconds=50)


def test_unlimited_is_a_hundred_years_and_can_be_subtracted_from_now() -> None:
    assert Settings(keep_dead="36500d")
    assert refused_in_code(keep_dead=timedelta.max).key == "keep_dead"


def test_a_retention_window_may_be_shorter_than_the_backoff_cap() -> None:
    assert Settings(handling_retention_window="1s", handling_max_backoff_cap="5m")


def test_an_unknown_keyword_is_refused_with_the_nearest_name() -> None:
    error = refused_in_code(fanout_pol_delay="1s")

    assert str(error) == ("setting fanout_pol_delay = '1s': expected a known setting; did you mean fanout_poll_delay?")


def test_an_unrecognizable_keyword_is_refused_with_all_names() -> None:
    error = refused_in_code(zzz=1)

    assert all(leaf in error.expected for leaf in LEAFS)


def test_decoding_raises_the_same_error() -> None:
    with pytest.raises(SettingsError, match="concurrency = 0"):
        msgspec.json.decode(b'{"concurrency": 0}', type=Settings)


# --- load: names ---------------------------------------------------------------------------------


def test_an_empty_source_gives_the_defaults() -> None:
    assert Settings.load(None, environ=None) == Settings()
    assert load({}) == Settings()


@pytest.mark.parametrize(
    "source",
    [
        {"handling_poll_delay": "3s"},
        {"handling-poll-delay": "3s"},
        {"handlingPollDelay": "3s"},
        {"handling": {"poll_delay": "3s"}},
        {"handling": {"poll-delay": "3s"}},
        {"handling": {"pollDelay": "3s"}},
        {"handling": {"poll": {"delay": "3s"}}},
        {"handling.poll-delay": "3s"},
    ],
)
def test_a_name_may_be_in_snake_kebab_or_camel_case(source: dict[str, object]) -> None:
    assert load(source) == Settings(handling_poll_delay="3s")


def test_nested_and_flat_names_mix() -> None:
    source = {"handling": {"enabled": False, "poll-delay": "1m"}, "keep": {"dead": "1d"}, "concurrency": 5}

    assert load(source) == Settings(handling_enabled=False, handling_poll_delay="1m", keep_dead="1d", concurrency=5)


@pytest.mark.parametrize("leaf", LEAFS)
def test_every_setting_is_found_by_each_of_its_names(leaf: str) -> None:
    value = getattr(Settings(), leaf)
    first, *rest = leaf.split("_")
    names = {leaf, leaf.replace("_", "-"), first + "".join(word.title() for word in rest)}

    for name in names:
        assert load({name: value}) == Settings()


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ({"fanout-pol-delay": "1s"}, "fanout-pol-delay"),
        ({"handling": {"poll-dely": "1s"}}, "handling.poll-dely"),
        ({"local-event-handler": {"fanout-poll-delay": "1s"}}, "local-event-handler.fanout-poll-delay"),
        ({"CONCURRENCY": 5}, "CONCURRENCY"),
        ({"concurrency": {"max": 5}}, "concurrency.max"),
        ({"handlng": {}}, "handlng"),
        ({1: 2}, "1"),
    ],
)
def test_an_unknown_key_is_refused_as_written(source: dict[str, object], key: str) -> None:
    error = refused(source)

    assert error.key == key
    assert error.expected.startswith("a known setting")


def test_an_unknown_key_comes_with_the_nearest_name() -> None:
    assert "did you mean handling_poll_delay?" in str(refused({"handling": {"poll-dely": "1s"}}))


def test_an_empty_group_sets_nothing() -> None:
    assert load({"handling": {}}) == Settings()


def test_two_spellings_of_one_setting_are_refused() -> None:
    error = refused({"handling": {"poll-delay": "1s"}, "handlingPollDelay": "2s"})

    assert str(error) == (
        "setting handlingPollDelay = '2s': "
        "expected one spelling of handling_poll_delay, which is also given as handling.poll-delay"
    )


# --- load: values --------------------------------------------------------------------------------


def test_text_is_converted() -> None:
    source = {"concurrency": "50", "notify": "false", "keep_dead": "1d", "handler_timeout": "2.5"}

    assert load(source) == Settings(concurrency=50, notify=False, keep_dead="1d", handler_timeout=2.5)


@pytest.mark.parametrize("text", ["true", "True", "yes", "on", "1"])
def test_spellings_of_true(text: str) -> None:
    assert load({"purge_enabled": text}).purge_enabled is True


@pytest.mark.parametrize("text", ["false", "FALSE", "no", "off", "0"])
def test_spellings_of_false(text: str) -> None:
    assert load({"purge_enabled": text}).purge_enabled is False


@pytest.mark.parametrize(
    ("source", "key", "value"),
    [
        ({"concurrency": "many"}, "concurrency", "many"),
        ({"concurrency": ""}, "concurrency", ""),
        ({"concurrency": "1.5"}, "concurrency", "1.5"),
        ({"concurrency": {}}, "concurrency", {}),
        ({"maxHops": [1]}, "maxHops", [1]),
        ({"handling": {"enabled": "maybe"}}, "handling.enabled", "maybe"),
        ({"handling": {"poll-delay": "soon"}}, "handling.poll-delay", "soon"),
        ({"lock-heartbeat": "1ms"}, "lock-heartbeat", "1ms"),
    ],
)
def test_a_bad_value_is_refused_under_the_name_as_written(source: dict[str, object], key: str, value: object) -> None:
    error = refused(source)

    assert (error.key, error.value) == (key, value)


def test_a_choice_is_one_of_its_values(toml: Path) -> None:
    toml.write_text('[outboxio]\nbalance = "all"')

    assert Settings(balance="all").balance == "all"
    assert load(toml).balance == "all"
    assert load(OUTBOXIO_BALANCE="all").balance == "all"


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("partitoned", "; did you mean 'partitioned'?"),
        ("ALL", "; did you mean 'all'?"),
        ("none", ""),
        ("", ""),
        (True, ""),
        (["all"], ""),
    ],
)
def test_an_invalid_choice_is_refused_with_the_nearest_value(value: Any, hint: str) -> None:
    expected = f"one of 'partitioned', 'all'{hint}"

    assert refused_in_code(balance=value).expected == expected
    assert refused({"balance": value}).expected == expected


# --- load: environment ---------------------------------------------------------------------------


def test_the_environment_overrides_the_source() -> None:
    source = {"concurrency": 5, "keep-dead": "1d"}

    assert load(source, OUTBOXIO_CONCURRENCY="7") == Settings(concurrency=7, keep_dead="1d")


def test_values_overridden_by_the_environment_must_still_be_valid() -> None:
    assert refused({"concurrency": "many"}, OUTBOXIO_CONCURRENCY="7").key == "concurrency"


@pytest.mark.parametrize("leaf", LEAFS)
def test_every_setting_has_a_variable(leaf: str) -> None:
    value = getattr(Settings(), leaf)
    text = str(value.total_seconds() if isinstance(value, timedelta) else value)

    assert Settings.load(environ={f"OUTBOXIO_{leaf.upper()}": text}) == Settings()


def test_the_environment_of_the_process_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOXIO_FANOUT_POLL_DELAY", "250ms")

    assert Settings.load() == Settings(fanout_poll_delay=0.25)
    assert Settings.load(environ=None) == Settings()


def test_a_bad_environment_value_is_refused_under_the_variables_name() -> None:
    error = refused(OUTBOXIO_CONCURRENCY="many")

    assert str(error) == "setting OUTBOXIO_CONCURRENCY = 'many': expected a whole number, 1 or more"
    assert refused(OUTBOXIO_KEEP_DEAD="-1d").key == "OUTBOXIO_KEEP_DEAD"


@pytest.mark.parametrize("variable", ["OUTBOXIO_CONCURENCY", "OUTBOXIO_concurrency"])
def test_an_unknown_variable_is_refused_with_the_nearest_one(variable: str) -> None:
    error = refused(**{variable: "5"})

    assert error.key == variable
    assert "did you mean OUTBOXIO_CONCURRENCY?" in error.expected


def test_the_value_of_an_unknown_variable_is_not_repeated() -> None:
    assert "hunter2" not in str(refused(OUTBOXIO_DATABASE_URL="postgresql://app:hunter2@db/app"))


def test_unrelated_variables_are_ignored() -> None:
    settings = load(
        OUTBOXIO_TEST_POSTGRES="postgresql://localhost", OUTBOXIO_DATABASE="sqlite://", OUTBOXIOUS="1", PATH="/bin"
    )

    assert settings == Settings()


def test_the_variables_of_a_kubernetes_service_are_not_settings() -> None:
    of_service = {
        "OUTBOXIO_SERVICE_HOST": "10.0.0.1", "OUTBOXIO_SERVICE_PORT": "80", "OUTBOXIO_SERVICE_PORT_HTTP": "80",
        "OUTBOXIO_PORT": "tcp://10.0.0.1:80", "OUTBOXIO_PORT_80_TCP": "tcp://10.0.0.1:80",
        "OUTBOXIO_DASHBOARD_PORT_80_TCP_ADDR": "10.0.0.1",
    }  # fmt: skip

    assert load(**of_service) == Settings()
    assert refused(OUTBOXIO_REPORT="1").key == "OUTBOXIO_REPORT"


def test_a_misspelled_variable_of_the_command_line_is_refused() -> None:
    assert "did you mean OUTBOXIO_NAMESPACE?" in refused(OUTBOXIO_NAMESPAC="shop").expected


@pytest.mark.parametrize("make", [lambda: Outbox("sqlite://", namespace="app"), lambda: Producer("app")])
def test_without_settings_the_environment_is_read(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOXIO_CONCURRENCY", "lots")
    with pytest.raises(SettingsError, match=r"OUTBOXIO_CONCURRENCY = 'lots': expected a whole number"):
        make()

    monkeypatch.delenv("OUTBOXIO_CONCURRENCY")
    monkeypatch.setenv("OUTBOXIO_CONCURENCY", "7")
    with pytest.raises(SettingsError, match=r"OUTBOXIO_CONCURENCY.*did you mean OUTBOXIO_CONCURRENCY\?"):
        make()


async def test_an_outbox_applies_the_environment_unless_it_has_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOXIO_CONCURRENCY", "7")

    assert Outbox("sqlite://", namespace="app").settings == Settings(concurrency=7)
    assert Outbox("sqlite://", namespace="app", settings=Settings()).settings == Settings()
    async with memory_outbox() as outbox:
        assert outbox.settings.concurrency == Settings().concurrency


# --- load: files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '[outboxio]\nkeep-dead = "1d"\nhandling.enabled = false\n[other]\nx = 1',
        '[tool.outboxio]\nkeepDead = "1d"\n[tool.outboxio.handling]\nenabled = false\n[tool.ruff]\nx = 1',
        'keep_dead = 86_400\n[handling]\nenabled = "no"',
        '[outboxio]\nkeep_dead = "P1D"\nhandling_enabled = false\n[tool.outboxio]\ntarget = "app:outbox"',
    ],
)
def test_toml_settings_are_in_an_outboxio_table_or_at_top_level(toml: Path, text: str) -> None:
    toml.write_text(text)

    expected = Settings(keep_dead="1d", handling_enabled=False)
    assert load(toml) == load(str(toml)) == expected


@pytest.mark.parametrize("second", ["concurrency = 5", "unknown = 1", "handling.enabled = true"])
def test_two_tables_of_settings_in_one_file_are_refused(toml: Path, second: str) -> None:
    toml.write_text(f"[outboxio]\nconcurrency = 4\n[tool.outboxio]\n{second}\n")

    error = refused(toml)
    assert error.key == "tool.outboxio"
    assert "one table of settings" in error.expected


@pytest.mark.parametrize(
    "text",
    [
        'database_url = "postgresql://app:hunter2@db/app"',
        '[outboxio.database]\npassword = "hunter2"',
        'concurrency.password = "hunter2"',
        '[[outboxio.secrets]]\nvalue = "hunter2"',
        'outboxio = "hunter2"',
        'tool.outboxio = "hunter2"',
    ],
)
def test_the_value_of_an_unknown_key_is_not_repeated(toml: Path, text: str) -> None:
    toml.write_text(text)

    error = refused(toml)
    assert "hunter2" not in f"{error} {error.value}"


def test_a_mapping_may_have_the_same_tables() -> None:
    assert load({"tool": {"outboxio": {"concurrency": 5}}, "project": {}}) == Settings(concurrency=5)


@pytest.mark.parametrize(
    ("source", "key"), [({"outboxio": 5}, "outboxio"), ({"tool": {"outboxio": "x"}}, "tool.outboxio")]
)
def test_an_outboxio_key_that_is_not_a_table_is_refused(source: dict[str, object], key: str) -> None:
    error = refused(source)

    assert (error.key, error.expected) == (key, "a table of settings")


def test_a_missing_file_is_refused_naming_its_path(toml: Path) -> None:
    assert str(toml) in str(refused(toml))


@pytest.mark.parametrize("content", [b"concurrency = ", b"\xff"])
def test_a_file_that_is_not_toml_is_refused_naming_its_path(toml: Path, content: bytes) -> None:
    toml.write_bytes(content)

    error = refused(toml)
    assert error.value == str(toml)
    assert error.__cause__ is not None
