"""The dashboard and the alert rules ask for metrics that a scrape has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagoda_server.router.telemetry.families import FAMILIES

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "pagoda.json").read_text())
RULES: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
SUFFIXES = ("_bucket", "_sum", "_count")
LABELS = {"model_name", "le", "instance", "job"}  # the last two are those of Prometheus itself


def shown_names() -> dict[str, set[str]]:
    """Names of series, and their labels."""
    return {
        f"{name}{suffix}": {*family.labels, *LABELS}
        for family in FAMILIES
        for name in family.full_names
        for suffix in (SUFFIXES if family.kind == "histogram" else ("",))
    }


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"]
    for group in RULES["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def selectors(query: str) -> Iterator[tuple[str, set[str]]]:
    """The series that a query names, and the labels that it names of them."""
    for name, matchers in re.findall(r"\b((?:pagoda|process|vllm)[_:]\w+)(?:\{(.*?)\})?", query):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!=|=)\s*\"", matchers))


def test_every_series_and_label_that_is_asked_for_is_in_a_scrape() -> None:
    shown = shown_names()
    asked = [selector for query in queries() for selector in selectors(query)]
    assert len(asked) > 50
    for name, labels in asked:
        assert name in shown
        assert labels <= shown[name], name
    for query in queries():
        if names := [name for name, _ in selectors(query)]:
            known = set.union(*(shown[name] for name in names))
            for grouped in re.findall(r"\bby \(([^)]*)\)", query):
                assert set(grouped.replace(" ", "").split(",")) <= known, query


def test_every_panel_takes_its_data_source_from_the_variable() -> None:
    (source,) = [each for each in DASHBOARD["templating"]["list"] if each["type"] == "datasource"]
    assert (source["name"], source["query"]) == ("datasource", "prometheus")
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    targets = [target for panel in panels for target in panel["targets"]]
    assert {each["datasource"]["uid"] for each in (*panels, *targets)} == {"${datasource}"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_no_two_panels_lie_over_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


@pytest.mark.parametrize("rule", [rule["alert"] for group in RULES["groups"] for rule in group["rules"]])
def test_each_alert_is_tried_raised_and_not_raised(rule: str) -> None:
    tests = yaml.safe_load((DEPLOY / "prometheus" / "rules_test.yml").read_text())["tests"]
    tried = [
        bool(each.get("exp_alerts")) for test in tests for each in test["alert_rule_test"] if each["alertname"] == rule
    ]
    assert set(tried) == {True, False}
