"""What `import turnwise` promises, it holds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import turnwise
from trials import stub


@pytest.mark.parametrize("name", turnwise.__all__)
def test_every_public_name_imports(name):
    assert getattr(turnwise, name) is not None


def test_a_wrong_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        turnwise.trian  # noqa: B018


def test_importing_the_package_does_not_import_torch():
    code = "import sys, turnwise; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_editors_see_every_public_name_and_setting():
    assert set(turnwise._PUBLIC) <= set(dir(turnwise))
    assert stub.FILE.read_text(encoding="utf-8") == stub.stub(), "write it anew: python -m trials.stub --write"


def test_the_version_is_the_same_everywhere():
    root = Path(__file__).parent.parent
    places = {"pyproject.toml": r'^version = "(.+)"', "CITATION.cff": r"^version: (.+)"}
    versions = {p: re.search(r, (root / p).read_text("utf-8"), re.MULTILINE)[1] for p, r in places.items()}
    assert set(versions.values()) == {turnwise.__version__}, versions
