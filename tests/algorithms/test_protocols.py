"""The calls of the loop: each role has a Protocol, each of its methods a deadline."""

from types import SimpleNamespace

import pytest

from jaxrl.algorithms.protocols import ActorRole, call_deadlines, protocols
from jaxrl.config.schema import Config
from jaxrl.run.launch import MAKERS
from jaxrl.run.loop import Calls
from jaxrl.runtime.worker import methods_of

SERVED = ["teacher.address=host:1", "teacher.model=null"]


@pytest.mark.parametrize("given", [[], SERVED], ids=["placed", "served"])
def test_each_role_has_a_protocol_and_each_call_a_deadline(given):
    config = Config.load(None, [*given, "deadlines.score=7"])
    named = {role: methods_of(protocol) for role, protocol in protocols(config).items()}
    assert named.keys() == MAKERS.keys()
    assert named["teacher"] == (["score"] if given else ["generate", "sample", "score"])
    deadlines = call_deadlines(config)
    assert {deadlines[name] for names in named.values() for name in names} == {600, 7}
    assert deadlines["score"] == 7


def test_a_call_is_sent_by_the_name_of_the_method():
    sent = []
    actor = SimpleNamespace(call=lambda *args, **kwargs: sent.append((args, kwargs)))
    calls = Calls(Config.load(None, ["deadlines.weight_sync=7"]), {"actor": actor})
    calls.call("actor", ActorRole.publish, version=3, dtype="float32")
    asked = {"version": 3, "dtype": "float32", "deadline": 7, "aside": False, "own_error": False}
    assert sent == [(("publish",), asked)]
