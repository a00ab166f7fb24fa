"""The declaration of the settings, and what is made from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pagoda_server.settings import EngineConfig, EngineSettings, RouterSettings, ServeConfig, SettingError
from pagoda_server.settings.__main__ import page
from pagoda_server.settings.command_line import command
from pagoda_server.settings.setting import Settings, setting

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Kettle(Settings):
    cups: int = setting(2, "How many cups to boil.", unit="cups", at_least=1, at_most=8)
    degrees: float = setting(90.0, "How hot.", unit="degrees", above=0)
    is_loud: bool = setting(True, "Whether it whistles.")
    is_new: bool = setting(False, "Whether to rinse it first.")
    label: str | None = setting(None, "What it is called.", shown_default="its maker's name", is_private=True)


def parsed(config: type[Settings], *arguments: str) -> Any:
    """What a command makes of its arguments."""
    given: list[Settings] = []

    def run(settings: Settings) -> int:
        """Boil."""
        given.append(settings)
        return 0

    app = typer.Typer()
    app.command()(command(config, run))
    result = CliRunner().invoke(app, arguments)
    return given[0] if result.exit_code == 0 else (result.exit_code, result.stderr)


def test_a_command_takes_the_settings_of_a_class_as_options() -> None:
    assert parsed(Kettle) == Kettle()
    given = parsed(Kettle, "--cups", "3", "--degrees=70", "--no-is-loud", "--is-new", "--label", "Bob")
    assert given == Kettle(3, 70.0, False, True, "Bob")


def test_a_switch_that_is_off_cannot_be_turned_off() -> None:
    code, complaint = parsed(Kettle, "--no-is-new")
    assert code == 2
    assert "--no-is-new" in complaint


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"cups": 0}, "--cups must be from 1 to 8, not 0"),
        ({"cups": 10**30}, f"--cups must be from 1 to 8, not {10**30}"),
        ({"degrees": 0.0}, "--degrees must be above 0 and finite, not 0.0"),
        ({"degrees": math.inf}, "--degrees must be above 0 and finite, not inf"),
        ({"degrees": math.nan}, "--degrees must be above 0 and finite, not nan"),
    ],
)
def test_a_number_outside_its_range_is_refused_with_flag_range_and_value(
    settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(SettingError) as caught:
        Kettle(**settings)
    assert str(caught.value) == complaint
    ((name, value),) = settings.items()
    assert parsed(Kettle, f"--{name}={value}") == (2, f"error: {complaint}\n")


@pytest.mark.parametrize("text", ["", "many", "1.5"])
def test_a_value_of_another_type_is_a_usage_error_that_names_the_option(text: str) -> None:
    code, complaint = parsed(Kettle, "--cups", text)
    assert code == 2
    assert "--cups" in complaint


def test_a_spawned_engine_reads_its_settings_back_from_its_arguments() -> None:
    told = ServeConfig(
        model="m", log_level="debug", device="cpu", dtype="float32", quantization="int8", kv_cache_dtype="fp8",
        kv_cache_gb=1.5, host_kv_gb=2.5, block_size=32, max_num_seqs=8, token_budget=128, policy="fair",
        priority_ageing_s=5.5, tenant_weights="a=2,b=3", target_itl_ms=40.0, overlap="on", max_model_len=4096,
        prefix_caching=False, threads=3, step_ms="1,2",
    )  # fmt: skip
    engine = parsed(EngineConfig, *told.engine_arguments(Path("/folder"), "unix:/e"))
    assert (engine.model, engine.listen) == ("/folder", "unix:/e")
    for field in fields(EngineSettings):
        assert getattr(engine, field.name) == getattr(replace(told, model="/folder"), field.name)
        assert getattr(told, field.name) != field.default, f"{field.name} is not tested"


def test_clients_are_told_what_is_in_effect_and_nothing_private() -> None:
    assert Kettle(label="secret").reported(Kettle, degrees=99.5) == {
        "cups": "2", "degrees": "99.5", "is_loud": "true", "is_new": "false",
    }  # fmt: skip


def test_clients_are_told_of_no_path_and_no_address() -> None:
    config = ServeConfig(
        model="/secret/model", listen="unix:/secret/s", engine="unix:/secret/e", auth_token_file="/secret/token",
        tls_cert="/secret/cert", tls_key="/secret/key",
    )  # fmt: skip
    reported = config.reported(RouterSettings) | config.reported(EngineSettings)
    assert reported["max_requests"] == "1024"
    assert not any("secret" in value for value in reported.values())


def test_the_page_of_settings_is_up_to_date() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == page(), "run `make settings`"
