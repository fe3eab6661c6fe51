"""The calls of the loop: each role has a Protocol, each of its methods a deadline."""

import pytest

from jaxrl.algorithms.protocols import ActorRole, Ask, deadline_of, protocols
from jaxrl.config.schema import Config
from jaxrl.run.launch import MAKERS
from jaxrl.runtime.worker import methods_of

SERVED = ["teacher.address=host:1", "teacher.model=null"]


@pytest.mark.parametrize("given", [[], SERVED], ids=["placed", "served"])
def test_each_role_has_a_protocol_and_each_call_a_deadline(given):
    config = Config.load(None, [*given, "deadlines.score=7"])
    named = {role: methods_of(protocol) for role, protocol in protocols(config).items()}
    assert named.keys() == MAKERS.keys()
    assert named["teacher"] == (["score"] if given else ["generate", "sample", "score"])
    assert {deadline_of(config, name) for names in named.values() for name in names} == {600, 7}
    assert deadline_of(config, "score") == 7


def test_a_call_is_sent_by_the_name_of_the_method():
    sent = []
    ask = Ask(lambda *args, **kwargs: sent.append((args, kwargs)))
    ask("actor", ActorRole.publish, version=3, dtype="float32")
    assert sent == [(("actor", "publish"), {"version": 3, "dtype": "float32"})]
