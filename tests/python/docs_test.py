"""The documents say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tf_smb import settings

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("setting", list(settings.SETTINGS.values()), ids=lambda s: s.name)
def test_settings_table_has_every_setting_and_its_default(setting):
    rows = [
        line
        for line in (ROOT / "docs" / "settings.md").read_text().splitlines()
        if f"`{setting.variable}`" in line and line.startswith("|")
    ]
    assert len(rows) == 1
    if setting.default is not None:
        default = rows[0].split("|")[4].strip()
        number = str(setting.default).removesuffix(".0")
        assert default.strip("`").startswith(number)


def test_links_between_documents_lead_somewhere():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
