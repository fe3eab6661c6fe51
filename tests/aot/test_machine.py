"""Names of targets; what is said where a target is unknown or an option stands alone."""

import pytest

from jaxrl.aot.machine import machine
from jaxrl.config import cli
from jaxrl.errors import UserError
from jaxrl.sharding.targets import GPUS, PUBLISHED, TPUS, target_machine
from jaxrl.train import main


@pytest.mark.parametrize("name", ["h300x8", "h200", "h200x0", "tpu-v9:2x4", "tpu-v5e:2x", ""])
def test_an_unknown_target_is_refused_with_the_known_ones(name):
    with pytest.raises(UserError, match="no such target") as error:
        machine(name)
    assert "h200xN" in str(error.value) and "tpu-v5e" in str(error.value)


@pytest.mark.parametrize("name", [*(f"{gpu}x8" for gpu in GPUS), *(f"tpu-{t}" for t in TPUS)])
def test_a_target_has_devices_of_one_kind_whose_ceilings_are_published(name):
    """What is not in the table would be measured, on a device that is not there."""
    target = target_machine(name, "--target")
    kinds = {device.device_kind for device in target.devices}
    assert len(kinds) == 1 and kinds <= PUBLISHED.keys()
    assert len(target.devices) == target.count and target.hosts == 1
    assert 8e9 < target.usable <= target.chip.memory < 300e9


@pytest.mark.parametrize(
    ("name", "near"),
    [("h200", "h200x1"), ("H100x4", "h100x4"), ("rtx-4090", "rtx4090x1"), ("h100-nvlx2", "nvlx2")],
)
def test_a_target_that_is_nearly_one_is_named(name, near):
    with pytest.raises(UserError, match=f"no such target \\(did you mean .*{near}"):
        target_machine(name, "--target")


@pytest.mark.parametrize(
    "name", ["tpu-v5e:0x4", "tpu-v5e:3x4", "tpu-v5e:16x32", "tpu-v5e:2x2x2", "tpu-v5p:8"]
)
def test_a_slice_that_no_pod_has_is_refused_with_what_is_allowed(name):
    """libtpu ends the process for some of them, and takes four chips of the fourth."""
    with pytest.raises(UserError, match="no such slice; a tpu-v5[ep] is 1 or 2 chips, or hosts of"):
        machine(name)


@pytest.mark.parametrize("name", ["h200x9", "a100x20", "h200x1000000"])
def test_several_hosts_are_full(name):
    with pytest.raises(UserError, match="multiples of 8"):
        machine(name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--compile", "h200x8"], "--compile h200x8 needs --dry-run"),
        (["--json"], "--json needs --dry-run"),
        (["--dry-run", "--suggest"], "--suggest needs --dry-run --compile TARGET"),
        (
            ["--dry-run", "--compile", "l4x1", "teacher.model=null", "teacher.address=host:1"],
            "teacher.model to a folder",
        ),
    ],
)
def test_options_that_need_another(words, said, capsys):
    assert cli.run(main, words) == 2
    assert said in capsys.readouterr().err
