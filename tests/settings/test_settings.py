"""The declaration of the settings, and what is made from it."""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from pagoda_server.settings import EngineConfig, EngineSettings, RouterSettings, ServeConfig, SettingError
from pagoda_server.settings.__main__ import page
from pagoda_server.settings.command_line import command
from pagoda_server.settings.engine import StepLimits
from pagoda_server.settings.setting import Settings, setting
from pagoda_server.settings.sources import environment_without_settings, misspelt_variables, plain_settings

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Kettle(Settings):
    cups: int = setting(2, "How many cups to boil.", unit="cups", at_least=1, at_most=8)
    degrees: float = setting(90.0, "How hot.", unit="degrees", above=0)
    is_loud: bool = setting(True, "Whether it whistles.")
    is_new: bool = setting(False, "Whether to rinse it first.")
    label: str | None = setting(None, "What it is called.", shown_default="its maker's name", is_private=True)


def parsed(config: type[Settings], *arguments: str) -> Any:
    """The configuration that a command makes of its arguments."""
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


def test_options_win_over_variables_variables_over_a_file_and_a_file_over_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "pagoda.toml"
    file.write_text('cups = 5\ndegrees = 60\nis-new = true\nis_loud = false\nlabel = "Ann"')
    assert parsed(Kettle, f"--config={file}") == Kettle(5, 60.0, False, True, "Ann")
    monkeypatch.setenv("PAGODA_CONFIG", str(file))
    monkeypatch.setenv("PAGODA_CUPS", "6")
    monkeypatch.setenv("PAGODA_IS_LOUD", "on")
    monkeypatch.setenv("PAGODA_LABEL", "")  # as good as none
    assert parsed(Kettle) == Kettle(6, 60.0, True, True, "Ann")
    assert parsed(Kettle, "--cups=7", "--no-is-new") == Kettle(7, 60.0, True, False, "Ann")


def test_a_bad_value_is_refused_with_its_origin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGODA_CUPS", "0")
    assert parsed(Kettle) == (2, "error: --cups must be from 1 to 8, not 0 (--cups is from $PAGODA_CUPS)\n")
    monkeypatch.setenv("PAGODA_CUPS", "many")
    code, complaint = parsed(Kettle)
    assert code == 2
    assert "PAGODA_CUPS" in complaint
    monkeypatch.delenv("PAGODA_CUPS")
    file = tmp_path / "pagoda.toml"
    file.write_text("degrees = -1")
    origin = f"(--degrees is from {file})"
    expected = f"error: --degrees must be above 0 and finite, not -1.0 {origin}\n"
    assert parsed(Kettle, f"--config={file}") == (2, expected)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"cupz = 3", "'cupz' is no setting; did you mean cups?"),
        (b"[serve]\ncups = 3", "'serve' is no setting"),
        (b'cups = "3"', "cups must be a whole number, not '3'"),
        (b"cups = 3.0", "cups must be a whole number, not 3.0"),
        (b"cups = true", "cups must be a whole number, not True"),
        (b'degrees = "hot"', "degrees must be a number, not 'hot'"),
        (b"is_new = 1", "is_new must be true or false, not 1"),
        (b"label = 3", "label must be a text, not 3"),
        (b"is_new = true\nis-new = true", "is_new is there twice, with hyphens and with underscores"),
        (b"cups = ", "is not TOML"),
        (b"\xff", "is not TOML"),
        (b"#" * (1 << 20) + b"#", "has more than 1048576 bytes"),
    ],
)
def test_a_file_with_a_mistake_is_refused_by_its_name_and_the_key(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    file = tmp_path / "pagoda.toml"
    file.write_bytes(content)
    code, printed = parsed(Kettle, f"--config={file}")
    assert code == 2
    assert printed.startswith(f"error: --config: {file}")
    assert complaint in printed


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert parsed(Kettle, f"--config={tmp_path / 'none'}")[1].endswith("none: No such file or directory\n")
    assert parsed(Kettle, f"--config={tmp_path}")[1].endswith(": Is a directory\n")


def test_variables_that_are_nearly_a_settings_are_named_and_those_of_kubernetes_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PAGODA_CUP", "PAGODA_LABEL", "PAGODA_PORT", "PAGODA_SERVICE_HOST", "PAGODA_PORT_50051_TCP"):
        monkeypatch.setenv(name, "1")
    assert misspelt_variables(Kettle) == [("PAGODA_CUP", "PAGODA_CUPS")]
    assert "PAGODA_SERVICE_HOST" not in dict(misspelt_variables(ServeConfig))


def test_a_child_that_has_its_settings_as_arguments_gets_none_from_the_environment() -> None:
    given = {"PAGODA_CUPS": "1", "PAGODA_CONFIG": "/f", "PAGODA_CACHE": "/c", "PATH": "/bin"}
    assert environment_without_settings(given, Kettle) == {"PAGODA_CACHE": "/c", "PATH": "/bin"}


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


SPECIAL = {
    "listen": "unix:/s",
    "otlp_endpoint": "http://collector:4318",
    "http": "127.0.0.1:1",
    "http_allowed_origins": "https://chat.example.org",
    "engine": "unix:/e",
    "lora": "name=path",
    "block_size": 32,
    "token_budget": 3,
    "policy": "fair",
    "tenant_weights": "a=2,b=3",
}


def another_value(field: Field[Any], kind: Any) -> Any:
    """A valid value other than the default."""
    if field.name in SPECIAL:
        return SPECIAL[field.name]
    kind = next((each for each in get_args(kind) if each is not NoneType), kind) if type(kind) is UnionType else kind
    if choices := get_args(kind):
        return next(choice for choice in choices if choice != field.default)
    if kind is bool:
        return not field.default
    return "other" if kind is str else kind(field.default or 1) + 1


@pytest.fixture(scope="module")
def config() -> ServeConfig:
    """A configuration in which no setting has its default."""
    kinds = get_type_hints(ServeConfig)
    return ServeConfig(**{field.name: another_value(field, kinds[field.name]) for field in fields(ServeConfig)})


def test_every_setting_of_the_server_is_an_option_of_serve(config: ServeConfig) -> None:
    arguments = []
    for field in fields(config):
        value, option = getattr(config, field.name), field.name.replace("_", "-")
        assert value != field.default
        spellings = {True: f"--{option}", False: f"--no-{option}"}
        arguments.append(spellings[value] if isinstance(value, bool) else f"--{option}={value}")
    assert parsed(ServeConfig, *arguments) == config


def test_a_spawned_engine_reads_its_settings_back_from_its_arguments(config: ServeConfig) -> None:
    engine = parsed(EngineConfig, *config.engine_arguments(Path("/folder"), "unix:/e"))
    expected = {field.name: getattr(config, field.name) for field in fields(EngineSettings)}
    assert engine == EngineConfig(**(expected | {"model": "/folder", "listen": "unix:/e"}))


def test_a_plain_command_line_is_read_without_a_parser_as_the_parser_reads_it(config: ServeConfig) -> None:
    arguments = config.engine_arguments(Path("/folder"), "unix:/e")
    assert plain_settings(arguments, EngineConfig) == parsed(EngineConfig, *arguments)
    apart = ("--cups", "3", "--degrees=70", "--no-is-loud", "--is-new", "--label", "a = b")
    assert plain_settings(apart, Kettle) == parsed(Kettle, *apart)
    assert plain_settings((), Kettle) == Kettle()


@pytest.mark.parametrize(
    "arguments",
    [
        *(("--help",), ("--config=x",), ("3",), ("--cups",), ("--cups", "--is-new"), ("--cups", "-1"), ("--cups=no",)),
        *(("--cups=9",), ("--cups=1", "--cups=2"), ("--is-new=1",), ("--no-cups=1",), ("--is_new",), ("-cups=1",)),
    ],
)
def test_whatever_else_a_command_line_has_is_left_to_the_parser(arguments: tuple[str, ...]) -> None:
    assert plain_settings(arguments, Kettle) is None


def test_a_value_that_is_no_choice_is_left_to_the_parser() -> None:
    assert plain_settings(("--device=cpu",), EngineConfig) == EngineConfig(device="cpu")
    assert plain_settings(("--device=oven",), EngineConfig) is None


def test_a_setting_in_the_environment_is_left_to_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_LABEL", "Ann")
    assert plain_settings((), Kettle) is None


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


def test_limits_of_a_step_depend_on_the_device_unless_they_are_set() -> None:
    assert EngineConfig("any").step_limits("cpu") == StepLimits(64, 512)
    assert EngineConfig("any").step_limits("cuda") == StepLimits(256, 8192)
    assert EngineConfig("any", max_num_seqs=8).step_limits("cuda") == StepLimits(8, 8192)


def test_a_limit_that_only_one_device_can_meet_is_refused_once_the_device_is_known() -> None:
    config = EngineConfig("any", max_num_seqs=600)
    assert config.step_limits("cuda") == StepLimits(600, 8192)
    with pytest.raises(SettingError, match=r"--token-budget \(512\) must exceed --max-num-seqs \(600\)"):
        config.step_limits("cpu")


def test_quotas_to_share_need_tenants_who_have_them() -> None:
    with pytest.raises(SettingError, match="--quotas-file needs --tenants-file"):
        ServeConfig(quotas_file="/run/quotas")
    assert ServeConfig(quotas_file="/run/quotas", tenants_file="/etc/tenants.toml").quotas_file == "/run/quotas"


@pytest.mark.parametrize(
    ("settings", "tried"),
    [
        ({}, [(256, 8192), (128, 4096), (64, 2048), (64, 1024), (64, 512)]),
        ({"max_num_seqs": 600}, [(600, 8192), (600, 4096), (600, 2048), (600, 1024)]),
        ({"token_budget": 300}, [(256, 300), (128, 300), (64, 300)]),
        ({"max_num_seqs": 8, "token_budget": 64}, [(8, 64)]),
    ],
)
def test_limits_that_are_not_set_are_halved_down_to_a_cpus_defaults(
    settings: dict[str, int], tried: list[tuple[int, int]]
) -> None:
    limits = EngineConfig("any", **settings).step_limits_to_try("cuda")  # type: ignore[arg-type]
    assert [(each.max_num_seqs, each.token_budget) for each in limits] == tried


def test_the_page_of_settings_is_up_to_date() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == page(), "run `make settings`"
