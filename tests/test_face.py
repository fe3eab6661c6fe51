"""The Python face: public names, whatever was imported before them."""

import subprocess
import sys

import pytest

import jaxrl


@pytest.mark.parametrize(
    "before", ["", "import jaxrl.train, jaxrl.generate", "from jaxrl.train import main"]
)
def test_public_names_are_callable_in_any_order(before):
    code = f"{before}\nfrom jaxrl import Config, dry_run, train, load_model, generate\n"
    code += "import jaxrl.train\n"
    code += "assert all(map(callable, (Config.load, dry_run, train, load_model, generate)))\n"
    code += "assert callable(jaxrl.train.main) and callable(jaxrl.train) and jaxrl.generate.main\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'tain'"):
        getattr(jaxrl, "tain")  # noqa: B009
