"""Names of targets; what is said where a target is unknown or an option stands alone."""

import pytest

from jaxrl.aot.machine import GPUS, machine
from jaxrl.config import cli
from jaxrl.errors import UserError
from jaxrl.sharding.ceilings import PUBLISHED
from jaxrl.train import main


@pytest.mark.parametrize("name", ["h300x8", "h200", "h200x0", "tpu-v9:2x4", "tpu-v5e:2x", ""])
def test_an_unknown_target_is_refused_with_the_known_ones(name):
    with pytest.raises(UserError, match="no such target") as error:
        machine(name)
    assert "h200xN" in str(error.value) and "tpu-v5e" in str(error.value)


def test_the_ceilings_of_every_gpu_are_published():
    """What is not in the table would be measured, on a device that is not there."""
    assert {gpu.kind for gpu in GPUS.values()} <= PUBLISHED.keys()


@pytest.mark.parametrize("name", ["h200x9", "a100x20"])
def test_several_hosts_are_full(name):
    with pytest.raises(UserError, match="multiples of 8"):
        machine(name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--compile", "h200x8"], "--compile h200x8 needs --dry-run"),
        (["--dry-run", "--json"], "--json needs --dry-run --compile TARGET"),
        (["--dry-run", "--suggest"], "--suggest needs --dry-run --compile TARGET"),
    ],
)
def test_options_that_need_another(words, said, capsys):
    assert cli.run(main, words) == 2
    assert said in capsys.readouterr().err
